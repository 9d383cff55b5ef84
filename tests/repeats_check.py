"""Every trace made twice, calls copied and every call run, and the two graphs compared node by node.

`twice` does so while it is entered. With AUTOSP_TEST_REPEATS=1 the whole test run does, rank processes included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autosp import backend
from autosp.passes import pipeline

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def lines(gm: fx.GraphModule) -> list[str]:
    """A graph as text: what each node computes from what, its value's metadata and where it comes from.

    Sizes stand as expressions, since a copy may use one that was worked out elsewhere; constants stand as numbers.
    """
    number: dict[fx.Node, str] = {}
    regions: dict[Any, int] = {}

    def operand(node: fx.Node) -> Any:
        if isinstance(node.meta.get("val"), _SYMBOLS):
            return str(node.meta["val"])
        if node.op == "get_attr":
            value = getattr(gm, str(node.target))
            return str(value.tolist() if isinstance(value, torch.Tensor) else value)
        return number[node]

    found = []
    for node in gm.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and isinstance(node.meta.get("val"), _SYMBOLS)):
            continue
        number[node] = f"%{len(number)}"
        args, kwargs = map_arg(node.args, operand), map_arg(node.kwargs, operand)
        where = [node.meta.get("stack_trace"), node.meta.get("nn_module_stack"), node.meta.get("recompute")]
        region = node.meta.get("ac_graph_id")
        where.append(regions.setdefault(region, len(regions)))
        target = node.target if node.op == "call_function" else node.op
        found.append(f"{number[node]} = {target} {args} {kwargs} : {described(node.meta.get('val'))} {where}")
    return found


def described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return str([described(item) for item in value])
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.stride()} {value.storage_offset()} {value.dtype} {value.device}"
    return str(value)


def _compared(function: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        plain, shared = function(*args, **kwargs, share=False), function(*args, **kwargs)
        graphs = [result if isinstance(result, fx.GraphModule) else result[0] for result in (plain, shared)]
        expected, got = map(lines, graphs)
        for index, (a, b) in enumerate(zip(expected, got, strict=False)):
            assert a == b, f"line {index} of {len(expected)} is\n{b}\nwhere running every call gives\n{a}"
        assert len(expected) == len(got)
        if not isinstance(plain, fx.GraphModule):
            assert str(plain[1]) == str(shared[1])
        seen.append(len(got))
        return shared

    return both


@contextlib.contextmanager
def twice() -> Iterator[list[int]]:
    """Compare every trace; gives the number of lines of each."""
    seen: list[int] = []
    before = backend.capture_graph, pipeline.localize_graph
    backend.capture_graph, pipeline.localize_graph = (_compared(function, seen) for function in before)
    try:
        yield seen
    finally:
        backend.capture_graph, pipeline.localize_graph = before


def start() -> None:
    """Compare every trace of this process from now on."""
    if getattr(backend.capture_graph, "__name__", "") != "both":
        twice().__enter__()
