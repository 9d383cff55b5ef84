"""The Triton kernels of block attention against attention written out in fp64, in Triton's interpreter without a GPU.

The interpreter is chosen when a kernel is defined, so without a GPU this file runs itself once more in a process that
has ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from block_kernel_cases import BATCH, CASES, HEADS, Case, reference
from torch import Tensor

from autosp.custom_ops.block_attention import blocks, fused

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
INSIDE = GPU or os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
SCALE = 0.4
NO_GRADIENT = {"exact_bias": "the gradient of a dense tensor", "table": "the gradient of a table"}
attend = torch.ops.autosp.block_attention.default


def run_inside(marker: str, timeout: int) -> None:
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    environment.pop("AUTOSP_TRITON", None)
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", marker, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@pytest.mark.skipif(INSIDE, reason="the kernels run in this process")
def test_in_the_interpreter():
    run_inside("not slow", 500)


@pytest.mark.slow
@pytest.mark.skipif(INSIDE, reason="the kernels run in this process")
def test_wide_sweep_in_the_interpreter():
    run_inside("slow", 500)


inside = pytest.mark.skipif(not INSIDE, reason="run by test_in_the_interpreter")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 x 16, so that short sequences have several."""
    from autosp.custom_ops.block_attention.kernels import launch
    from autosp.custom_ops.block_attention.kernels.tiles import Tiles

    for name in ("forward_tiles", "keys_tiles", "queries_tiles"):
        monkeypatch.setattr(launch, name, lambda *_: Tiles(16, 16, 4, 1))


def operands(rows: int, keys: int, size: int = 8, value_size: int = 6, key_heads: int = 1) -> list[Tensor]:
    """fp64 ``q, k, v`` of two batch rows; q as a model has it, a transposed view."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)  # noqa: E731
    q = draw(BATCH, rows, HEADS, size).transpose(1, 2)
    return [q, draw(BATCH, key_heads, keys, size), draw(BATCH, key_heads, keys, value_size)]


def problem_of(case: Case, leaves: list[Tensor], rows: int, keys: int) -> blocks.Problem:
    return blocks.Problem.of(leaves, [], case.program, SCALE, [0, 0, 0, 0], [rows, keys], list(case.bounds))


def exact(case: Case, qkv: list[Tensor], leaves: list[Tensor], grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of q, k, v and floating-point leaves, in fp64."""
    wide = [x.double() if x.is_floating_point() else x for x in leaves]
    wanted = [x.requires_grad_() for x in [*(x.detach().double() for x in qkv), *wide] if x.is_floating_point()]
    out = reference(case, *wanted[:3], wide, SCALE)
    grads = torch.autograd.grad(out, wanted, grad.double(), allow_unused=True)
    return out, [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]


def close(mine: Tensor, other: Tensor, tolerance: float, terms: float = 1.0) -> None:
    other = other.detach()
    scale = max(terms, float(other.abs().max())) if other.numel() else 1.0
    torch.testing.assert_close(mine.double(), other.double(), rtol=0, atol=tolerance * scale)


def check(name: str, qkv: list[Tensor], dtype: torch.dtype = torch.float32, tolerance: float = 3e-6) -> None:
    """Forward and every gradient of the kernels. Of exact biases and tables they make none, and say so."""
    case, (rows, keys) = CASES[name], (qkv[0].shape[2], qkv[1].shape[2])
    leaves = [x.to(DEVICE) for x in case.leaves(rows, keys)]
    qkv = [x.to(dtype) for x in qkv]
    problem = problem_of(case, leaves, rows, keys)
    wanted = [x.is_floating_point() for x in leaves]
    vector = name == "exact_bias" and min(rows, keys) == 1  # a single row or column: its gradient they make
    if name in NO_GRADIENT and not vector:
        assert fused.refusal(problem, *qkv, wanted) == NO_GRADIENT[name]
        wanted = [False for _ in leaves]
    assert fused.refusal(problem, *qkv, wanted) == ""
    out, lse = fused.forward(problem, *qkv)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    found = fused.backward(problem, grad, None, *qkv, out, lse, wanted)
    expected, gradients = exact(case, qkv, leaves, grad)
    assert out.dtype == dtype and lse.dtype == torch.float32 and out.is_contiguous()
    close(out, expected, tolerance)
    # A softmax over one key is 1, and the gradients before it are zero: differences of terms a row, added up.
    terms = float(rows) if keys == 1 else 1.0
    for mine, other in zip([*found[:3], *(g for g, want in zip(found[3], wanted, strict=True) if want)], gradients,
                           strict=False):  # fmt: skip
        close(mine, other, tolerance, terms)


@inside
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, small_tiles: None):
    check(name, operands(21, 35) if name != "exact_mask" else operands(35, 21))


@inside
@pytest.mark.parametrize(
    ("size", "value_size", "dtype", "tolerance"),
    [(16, 16, torch.float32, 3e-6), (40, 20, torch.float32, 3e-6), (16, 33, torch.float16, 3e-3)],
)
def test_head_sizes_and_dtypes(size: int, value_size: int, dtype: torch.dtype, tolerance: float, small_tiles: None):
    check("document", operands(18, 18, size, value_size, key_heads=2), dtype, tolerance)


@inside
def test_query_heads_of_a_group_in_programs_of_their_own(small_tiles: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "_WANTED_PROGRAMS", 10**6)
    check("alibi", operands(18, 18))


@inside
def test_a_gradient_of_the_log_sum_exp(small_tiles: None):
    case, (q, k, v) = CASES["chunk"], [x.float() for x in operands(18, 18)]
    leaves = [x.to(DEVICE) for x in case.leaves(18, 18)]
    problem = problem_of(case, leaves, 18, 18)
    out, lse = fused.forward(problem, q, k, v)
    grad_lse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = fused.backward(problem, torch.zeros_like(out), grad_lse, q, k, v, out, lse, [False, False])
    expected = blocks.backward(problem, torch.zeros_like(out), grad_lse, q, k, v, out, lse, [False, False])
    for mine, other in zip(found[:3], expected[:3], strict=True):
        close(mine, other, 3e-6)


@inside
@pytest.mark.parametrize("name", ["document", "exact_mask", "alibi"])
def test_a_part_of_queries_heads_and_keys(name: str, small_tiles: None):
    """Rows that begin elsewhere, that do not exist, and keys that do not: as the plain blocks have them."""
    case = CASES[name]
    leaves = [x.to(DEVICE) for x in case.leaves(30, 30)]
    q, k, v = (x.float() for x in operands(20, 27, key_heads=2))
    settings = leaves, [], case.program, SCALE, [1, 1, 17, -3], [30, 30], list(case.bounds)
    problem = blocks.Problem.of(*settings)
    q, k, v = q[:1, 1:], k[:1, 1:], v[:1, 1:]
    wanted = [x.is_floating_point() for x in leaves]
    out, lse = fused.forward(problem, q, k, v)
    expected, expected_lse = blocks.forward(problem, q, k, v)
    close(out, expected, 3e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = fused.backward(problem, grad, None, q, k, v, out, lse, wanted)
    others = blocks.backward(problem, grad, None, q, k, v, expected, expected_lse, wanted)
    for mine, other in zip([*found[:3], *found[3]], [*others[:3], *others[3]], strict=True):
        close(mine, other, 5e-6)


@inside
def test_a_row_that_sees_nothing_and_no_rows_at_all(small_tiles: None):
    case = CASES["exact_mask"]
    q, k, v = (x.float() for x in operands(20, 18))
    leaves = [x.to(DEVICE) for x in case.leaves(20, 18)]
    v = v.clone()
    out, lse = fused.forward(problem_of(case, leaves, 20, 18), q, k, v)
    assert (out[:, :, 4] == 0).all() and (lse[:, :, 4] == float("-inf")).all() and lse[:, :, :4].isfinite().all()
    empty = fused.forward(problem_of(CASES["nothing"], [], 0, 18), q[:, :, :0], k, v)
    assert empty[0].shape == (BATCH, HEADS, 0, 6) and empty[1].shape == (BATCH, HEADS, 0)
    out, lse = fused.forward(problem_of(CASES["nothing"], [], 20, 0), q, k[:, :, :0], v[:, :, :0])
    assert (out == 0).all() and (lse == float("-inf")).all()


@inside
def test_hidden_tiles_are_not_read(small_tiles: None):
    """NaN in a document that a query does not see, in tiles of their own, stays there."""
    case = CASES["chunk"]
    q, k, v = (x.float() for x in operands(52, 52))
    leaves = [x.to(DEVICE) for x in case.leaves(52, 52)]
    k[:, :, 48:], v[:, :, 48:] = float("nan"), float("nan")
    out, _ = fused.forward(problem_of(case, leaves, 52, 52), q, k, v)
    assert out[:, :, :39].isfinite().all() and out[:, :, 51].isnan().all()


def arguments(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    case = CASES[name]
    qkv = [x.to(dtype) for x in operands(18, 18)]
    leaves = [x.to(DEVICE) for x in case.leaves(18, 18)]
    return qkv, leaves, [[], case.program, SCALE, [0, 0, 0, 0], [18, 18], list(case.bounds)]


@inside
@pytest.mark.parametrize("name", ["document", "table"])
def test_the_operator_takes_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch, small_tiles: None):
    """AUTOSP_TRITON=0 takes the plain blocks; both give the same. A learned table takes them in its backward alone."""
    calls = []
    for which in ("forward", "backward"):
        real = getattr(fused, which)
        monkeypatch.setattr(fused, which, lambda *a, real=real, which=which: calls.append(which) or real(*a))
    qkv, leaves, rest = arguments(name)
    wanted = [x.requires_grad_() for x in [*qkv, *leaves] if x.is_floating_point()]
    results = []
    for setting in ("1", "0"):
        monkeypatch.setenv("AUTOSP_TRITON", setting)
        out, _ = attend(*qkv, leaves, *rest)
        results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    assert calls == (["forward", "backward"] if name == "document" else ["forward"])
    for mine, other in zip(*results, strict=True):
        close(mine.detach(), other, 1e-5)


@inside
def test_what_the_kernels_leave_to_the_plain_blocks(monkeypatch: pytest.MonkeyPatch):
    qkv, leaves, rest = arguments("learned")
    problem = blocks.Problem.of(leaves, *rest)
    q, k, v = qkv
    wide = [torch.zeros(1, 1, 4, 257, device=DEVICE)] * 3
    assert fused.refusal(problem, q, k, v) == ""
    assert "no kernels for this device and dtype" in fused.refusal(problem, q.double(), k.double(), v.double())
    if not GPU:
        assert "does not multiply bfloat16" in fused.refusal(problem, q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert "q, k, v of torch.float32" in fused.refusal(problem, q, k.half(), v)
    assert "more than 256" in fused.refusal(problem, *wide)
    least = json.dumps({"steps": [["aten::minimum", [{"score": 0}, {"leaf": 2}], {}]], "score": {"step": 0}})
    least_of = blocks.Problem.of(leaves, [], least, *rest[2:])
    assert fused.refusal(least_of, q, k, v) == ""
    assert fused.refusal(least_of, q, k, v, [False] * 3) == "the derivative of aten::minimum"
    power = blocks.Problem.of(leaves, [], least.replace("minimum", "pow.Tensor_Tensor"), *rest[2:])
    assert "a power of" in fused.refusal(power, q, k, v)
    log2 = json.dumps({"steps": [["aten::log2", [{"score": 0}], {}]], "score": {"step": 0}})
    assert fused.refusal(blocks.Problem.of(leaves, [], log2, *rest[2:]), q, k, v) == "aten::log2"
    _, tables, table_rest = arguments("table")
    monkeypatch.setattr(fused, "_FAR", 19)
    assert "a table of more" not in fused.refusal(blocks.Problem.of(tables, *table_rest), q, k, v)
    long = [torch.zeros(12, HEADS, device=DEVICE)]
    assert "a table of more elements" in fused.refusal(blocks.Problem.of(long, *table_rest), q, k, v)
    monkeypatch.undo()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "atomics" in fused.refusal(problem, q, k, v, [True] * 3)
    assert fused.refusal(problem, q, k, v, [False] * 3) == ""
    monkeypatch.setenv("AUTOSP_TRITON", "0")
    assert "AUTOSP_TRITON=0" in fused.refusal(problem, q, k, v)


@inside
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "keys", "key_heads"), [(1, 33, 1), (33, 1, 2), (48, 32, 2), (50, 70, 1)])
def test_wide_sweep(name: str, rows: int, keys: int, key_heads: int, small_tiles: None):
    check(name, operands(rows, keys, 24, 24, key_heads))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="tiles of the size that a GPU takes")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("size", "dtype", "tolerance"),
    [
        (16, torch.float16, 4e-3),
        (64, torch.bfloat16, 3e-2),
        (80, torch.bfloat16, 3e-2),
        (128, torch.bfloat16, 3e-2),
        (128, torch.float32, 1e-5),
        (256, torch.float16, 4e-3),
        (256, torch.float32, 1e-5),
    ],
)
def test_on_a_gpu(name: str, size: int, dtype: torch.dtype, tolerance: float):
    qkv = [x * (8 / size) ** 0.5 for x in operands(700, 900, size, size)]
    check(name, qkv, dtype, tolerance)
