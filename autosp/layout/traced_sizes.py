"""Sizes that a trace cannot rebuild by itself.

A trace that meets a symbolic size made outside of it rebuilds it from its symbols, but neither powers nor products of
more than two factors (torch 2.11 to 2.14, ``torch.fx.experimental.proxy_tensor``). Queries times keys in one dimension
is such a size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import sympy
import torch
from torch.fx.experimental.proxy_tensor import _SympyExprTrackerValue, get_proxy_mode, get_proxy_slot
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


def make_products_known(inputs: Iterable[Any], used: Iterable[Any]) -> None:
    """Compute powers and longer products of sizes once under the trace at hand, so that it finds them again.

    Args:
        inputs: those of the trace: tensors and sizes, whose symbols it knows.
        used: tensors and sizes of which the trace may need a size; those with other symbols are left alone.
    """
    mode = get_proxy_mode()
    assert mode is not None, "called under a trace"
    tracer = mode.tracer
    symbols = {x.node.expr: x for x in _symbolic(inputs) if x.node.expr.is_Symbol}
    for expr in sorted(_products(_symbolic(used)), key=lambda e: (e.count_ops(), str(e))):
        if expr.free_symbols.issubset(symbols) and expr not in tracer.sympy_expr_tracker:
            value = sympy_interp(PythonReferenceAnalysis, symbols, expr)
            tracer.sympy_expr_tracker[expr] = _SympyExprTrackerValue(get_proxy_slot(value, tracer), value)


def _symbolic(values: Iterable[Any]) -> Iterator[torch.SymInt]:
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, torch.SymInt) and size.node.is_symbolic():
                yield size


def _products(sizes: Iterable[torch.SymInt]) -> set[sympy.Expr]:
    found: set[sympy.Expr] = set()
    for expr in {size.node.expr for size in sizes}:
        found.update(e for e in sympy.preorder_traversal(expr) if e.is_Pow or (e.is_Mul and len(e.args) > 2))
    return found
