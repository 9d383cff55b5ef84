"""The kernels of block attention compile for a GPU that is not here, and fit its shared memory and registers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from block_kernel_cases import CASES
from torch import Tensor

from autosp.custom_ops.block_attention.tile_map import TileLists
from autosp.custom_ops.block_attention.tile_program import leaf_kinds, tile_program

SPEC = importlib.util.find_spec("triton")
TOOLS = Path(SPEC.origin).parent / "backends/nvidia/bin" if SPEC and SPEC.origin else Path("nowhere")
pytestmark = [
    pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="this Triton brings no ptxas"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
SHARED = 227 * 1024
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int16: "*i16",
            torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}  # fmt: skip
LENGTH, HEADS, KEY_HEADS = 16384, 32, 8


def launches(name: str, dtype: torch.dtype, size: int) -> dict[str, Any]:
    """The launches of a call at a training size, of tensors that have no memory."""
    from autosp.custom_ops.block_attention.kernels import generate, launch

    case = CASES[name]
    kinds = leaf_kinds(case.leaves(64, 64))
    program = tile_program(case.program, kinds)
    functions = generate.tile_functions(case.program, kinds)
    wanted = tuple(i for i, x in enumerate(program.inputs) if x.dtype.is_floating_point and x.kind == "vector")
    pulling = generate.tile_functions(case.program, kinds, wanted) if wanted else functions
    inputs: list[Any] = []
    for item in program.inputs:
        inputs.append(meta(torch.uint8 if item.dtype == torch.bool else item.dtype, 16))
        inputs += [LENGTH * LENGTH, 0, LENGTH, 1] if item.kind == "dense" else [128, 32][: len(item.slots)]
    q, k = meta(dtype, 1, HEADS, LENGTH, size), meta(dtype, 1, KEY_HEADS, LENGTH, size)
    row = meta(torch.float32, 1, HEADS, LENGTH)
    place = (HEADS, LENGTH, LENGTH, 0, 0, 0, 0, 0, LENGTH, -5, 2**31 - 1, LENGTH - 1, LENGTH - 1, HEADS // KEY_HEADS)
    call = launch.Call(q, k, k, functions, program.score is not None, program.mask is not None, tuple(inputs) or (q,),
                       place, 0.1, any(x.kind != "vector" for x in program.inputs))  # fmt: skip
    lists = TileLists(meta(torch.int16, 1, 1, 128, 256), meta(torch.int32, 1, 1, 128, 2))
    upstream = launch.Upstream(q, row, row)
    buffers = [row for _ in wanted]
    return {
        "forward": launch.forward(call, lists, q, row),
        "keys": launch.keys(call, lists, upstream, k, k),
        "queries": launch.queries(call, lists, upstream, q, pulling.pull, buffers),
        "delta": launch.delta(q, q, None, row),
    }


def meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def source_of(launch: Any) -> Any:
    """What Triton compiles, with the specialisations that it makes of these arguments."""
    from triton.compiler import ASTSource

    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def type_of(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            return tuple(type_of(item, (*path, i)) for i, item in enumerate(value))
        if isinstance(value, Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return POINTERS[value.dtype]
        if isinstance(value, int) and value == 1:
            constants[path] = 1
            return "constexpr"
        if isinstance(value, int):
            if value % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        return "fp32"

    signature = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            constants[index,] = value
            signature[parameter.name] = "constexpr"
        else:
            signature[parameter.name] = type_of(value, (index,))
    return ASTSource(launch.kernel, signature, constants, attributes)


def compiled(launch: Any, folder: Path, capability: int = 90) -> tuple[Any, dict[str, int]]:
    """The kernel for a compute capability, and its registers (REG) and bytes of stack, where it spills (STACK)."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = triton.compile(source_of(launch), target=GPUTarget("cuda", capability, 32), options=launch.options)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return kernel, {name: int(count) for name, count in re.findall(r"(REG|STACK):(\d+)", usage)}


def check(name: str, dtype: torch.dtype, size: int, kernels: tuple[str, ...], folder: Path) -> None:
    made = launches(name, dtype, size)
    for which in kernels:
        kernel, usage = compiled(made[which], folder)
        about = f"{name} {dtype} {size} {which}: {usage}, {kernel.metadata.shared} bytes of shared memory"
        print(about, file=sys.stderr)
        assert kernel.metadata.shared <= SHARED, about
        # A few spilled values cost little; an accumulator in local memory would.
        assert usage["STACK"] <= 1024, about
        if dtype != torch.float32 and which != "delta":
            assert "wgmma.mma_async" in kernel.asm["ptx"], f"{about}: no tensor cores"


@pytest.mark.parametrize(
    ("name", "size", "kernels"),
    [
        ("document", 128, ("forward", "keys", "queries", "delta")),
        ("alibi", 64, ("queries",)),
        ("table", 128, ("keys",)),
    ],
)
def test_kernels_compile(name: str, size: int, kernels: tuple[str, ...], tmp_path: Path):
    check(name, torch.bfloat16, size, kernels, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("name", ["document", "alibi"])
def test_every_size_compiles(name: str, size: int, dtype: torch.dtype, tmp_path: Path):
    check(name, dtype, size, ("forward", "keys", "queries"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_mask_compiles(name: str, tmp_path: Path):
    check(name, torch.float16, 80, ("forward", "keys", "queries"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_kernels_fit_small_devices(size: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from autosp.custom_ops.block_attention.kernels import launch

    monkeypatch.setattr(launch, "room_of", lambda _: 99 * 1024)
    for name in ("document", "table"):
        made = launches(name, dtype, size)
        for which in ("forward", "keys", "queries"):
            kernel, usage = compiled(made[which], tmp_path, capability=86)
            assert kernel.metadata.shared <= 99 * 1024, (name, which, usage, kernel.metadata.shared)
