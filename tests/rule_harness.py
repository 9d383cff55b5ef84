"""One operator (or a few) at a time: the rules carried out on real tensors, against the whole computation.

A function is captured as the backend captures a model, its layouts are inferred with some inputs arriving cut, and the
local program is *run* on the shards, collectives and all. Padding rows of the shards hold junk, so that whatever lets
them reach a valid row shows. Everything is fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

JUNK = 977.0


@dataclass(frozen=True)
class Input:
    """An input of a case; ``"S"`` in the shape is the length of the sequence, ``at`` the dimension that arrives cut.

    Args:
        kind: "float", "probability", "bool", or ("int", bound) for integers below ``bound``.
        shape: sizes, "S" and "S+1" among them.
        at: the cut dimension; None for a whole tensor.
        home: for a whole tensor, the dimension that is known to run over the sequence.
        grad: whether a gradient is compared.
    """

    kind: Any
    shape: tuple[Any, ...]
    at: int | None = None
    home: int | None = None
    grad: bool = True


@dataclass(frozen=True)
class Case:
    """A function of tensors, its inputs, and what the layout of its first result must be.

    ``expect`` is "R" (whole), "P" (a partial sum), "S1" (cut along dimension 1), "W1" (a window of it), "F1" (a
    factor of it), "S1|S2" (either, by the size of the group), or "refuse: " with a part of the reason.
    """

    function: Callable[..., Any]
    inputs: Sequence[Input]
    expect: str


@dataclass
class Found:
    """What one rank saw: the layout, or the refusal, and the worst error of results and of gradients."""

    layout: str
    output_error: float = 0.0
    gradient_error: float = 0.0
    where: str = ""
    refused: str = ""
    notes: list[str] = field(default_factory=list)


def check(case: Case, name: str, found: list[dict[tuple[str, int], Found | str]], lengths: Sequence[int]) -> None:
    """What every rank found for a case is what the case expects, exact to rounding of fp64."""
    for results in found:
        for length in lengths:
            one = results[name, length]
            assert isinstance(one, Found), f"S={length}\n{one}"
            if case.expect.startswith("refuse: "):
                assert one.layout == "refused", f"S={length}: {one.layout}"
                assert case.expect.removeprefix("refuse: ") in one.refused
                continue
            assert one.layout in case.expect.split("|"), f"S={length}: {one.layout} {one.refused}"
            assert one.output_error <= 1e-12, f"S={length}: results differ by {one.output_error}"
            assert one.gradient_error <= 1e-12, f"S={length}: {one.where} differs by {one.gradient_error}"
            assert math.isfinite(one.output_error)


def make_input(spec: Input, length: int, seed: int) -> torch.Tensor:
    sizes = {"S": length, "S+1": length + 1}
    shape = [sizes.get(size, size) for size in spec.shape]
    generator = torch.Generator().manual_seed(seed)
    if spec.kind == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if isinstance(spec.kind, tuple):
        return torch.randint(0, spec.kind[1], shape, generator=generator)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.softmax(value, -1) if spec.kind == "probability" else value


def _label(layout: Any) -> str:
    from autosp.layout.placement import Partial, Shard

    first = layout[0] if isinstance(layout, (list, tuple)) else layout
    if isinstance(first, Shard):
        kind = "S" if first.is_plain else "W" if first.is_unfactored else "F"
        return f"{kind}{first.dim}"
    return "P" if isinstance(first, Partial) else "R"


def _capture(function: Callable[..., Any], values: list[torch.Tensor]) -> tuple[Any, Any]:
    from autosp.capture import capture_graph
    from autosp.layout import rules  # noqa: F401
    from autosp.layout.registry import find_rule
    from autosp.passes.functionalize_inplace import functionalize_inplace_pass

    plain = [value.detach().clone().requires_grad_(value.requires_grad) for value in values]
    gm = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*plain)
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    captured = capture_graph(gm, fakes, fakes[0].fake_mode, lambda target: find_rule(target) is not None)
    return functionalize_inplace_pass(captured), fakes


def _flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def run_case(axis: Any, case: Case, length: int, unsupported: str = "error") -> Found:
    """Run one case on this rank; collective over the axis."""
    from autosp.errors import UnsupportedGraphError
    from autosp.layout.infer import LAYOUT, Source, infer_layouts
    from autosp.layout.placement import shard_of_dim
    from autosp.passes.localize import LocalInterpreter
    from autosp.repeats import Repeats

    whole = [make_input(spec, length, 31 * i + length) for i, spec in enumerate(case.inputs)]
    for value, spec in zip(whole, case.inputs, strict=True):
        value.requires_grad_(value.is_floating_point() and spec.grad)
    captured, _ = _capture(case.function, whole)
    names = [node.name for node in captured.graph.find_nodes(op="placeholder")]
    sources, local = {}, []
    for name, value, spec in zip(names, whole, case.inputs, strict=True):
        held = value.detach().clone()
        if spec.at is not None:
            cut = shard_of_dim(value.shape, spec.at)
            sources[name] = Source(cut, cut)
            junk = JUNK if value.is_floating_point() else 0
            held = torch.ops.autosp.shard_sequence(
                held, cut.dim, cut.length, cut.size, cut.start, cut.outer, cut.inner, junk, axis.group
            )
        elif spec.home is not None:
            sources[name] = Source(home=shard_of_dim(value.shape, spec.home))
        local.append(held.requires_grad_(value.requires_grad))
    try:
        infer_layouts(captured, axis=axis, sources=sources, unsupported=unsupported)
    except UnsupportedGraphError as error:
        return Found("refused", refused=str(error))
    output = captured.graph.find_nodes(op="output")[0]
    first = output.args[0][0] if isinstance(output.args[0], (list, tuple)) else output.args[0]
    found = Found(_label(first.meta[LAYOUT]))
    # Real values: a call that another one repeats computes with other numbers.
    alone = Repeats(enabled=False)
    interpreter = LocalInterpreter(captured, axis=axis, parameters=frozenset(), outputs="full", repeats=alone)
    results = interpreter.run(*local)
    _compare(found, axis, case, length, whole, local, results)
    return found


def _compare(found: Found, axis: Any, case: Case, length: int, whole: Any, local: Any, results: Any) -> None:
    expected = _flat(case.function(*whole))
    dense = local_loss = torch.zeros((), dtype=torch.float64)
    for index, (value, reference) in enumerate(zip(results, expected, strict=False)):
        assert value.shape == reference.shape, (value.shape, reference.shape)
        assert value.dtype == reference.dtype, (value.dtype, reference.dtype)
        found.output_error = max(found.output_error, _error(value, reference))
        if reference.is_floating_point() and reference.requires_grad:
            generator = torch.Generator().manual_seed(index)
            upstream = torch.randn(reference.shape, generator=generator, dtype=torch.float64)
            dense = dense + (reference * upstream).sum()
            local_loss = local_loss + (value * upstream).sum()
    if not dense.requires_grad:
        return
    dense.backward()
    local_loss.backward()
    for index, (mine, reference, spec) in enumerate(zip(local, whole, case.inputs, strict=True)):
        if not reference.requires_grad:
            continue
        expected_grad = torch.zeros_like(reference) if reference.grad is None else reference.grad
        grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
        if spec.at is not None:
            expected_grad = torch.ops.autosp.shard_sequence(
                expected_grad, spec.at, length_of(reference, spec), length_of(reference, spec), 0, 1, 1, 0, axis.group
            )
        difference = _error(grad, expected_grad)
        if not difference <= found.gradient_error:
            found.gradient_error, found.where = difference, f"input {index}"


def length_of(value: torch.Tensor, spec: Input) -> int:
    assert spec.at is not None
    return value.shape[spec.at]


def _error(value: torch.Tensor, reference: torch.Tensor) -> float:
    if value.numel() == 0:
        return 0.0
    value, reference = value.detach().double(), reference.detach().double()
    if not torch.equal(value.isnan(), reference.isnan()) or not torch.equal(value.isinf(), reference.isinf()):
        return float("inf")
    finite = reference.isfinite()
    scale = max(1.0, reference[finite].abs().max().item()) if finite.any() else 1.0
    difference = (value - reference).abs()[finite]
    return difference.max().item() / scale if difference.numel() else 0.0


def run_cases(
    rank_info: Any,
    module: str,
    names: list[str],
    lengths: list[int],
    unsupported: str = "error",
    axis_name: str = "sp",
    attention: str = "auto",
) -> dict[tuple[str, int], Found | str]:
    """Run the cases of ``module.CASES``; a case that fails in an unexpected way gives its traceback."""
    import importlib
    import traceback

    import autosp
    from autosp import backend  # noqa: F401
    from autosp.layout.axis import Axis

    state = autosp.initialize({"autosp": {"inner_backend": "eager"}})
    axis = Axis(axis_name, state.sp_size, state.sp_rank, state.sp_group, attention=attention)
    cases = importlib.import_module(module).CASES
    found: dict[tuple[str, int], Found | str] = {}
    for name in names:
        for length in lengths:
            torch.manual_seed(0)
            try:
                found[name, length] = run_case(axis, cases[name], length, unsupported)
            except Exception:
                found[name, length] = traceback.format_exc(limit=-6)
    return found
