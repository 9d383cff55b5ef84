"""Interval arithmetic over blocks: bounds of what a step of a program can be in each block of queries and keys.

A value is ``(low, high)``, float64 tensors that broadcast over ``[batch, heads, query blocks, key blocks]``; booleans
are 0 and 1, so ``low`` says that all are true and ``high`` that some may be. Bounds may be wide and are never wrong:
every result is rounded as its dtype rounds, and what is not known, or beyond its dtype, is open. What may be NaN has an
infinite bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Interval = tuple[Tensor, Tensor]
_EXACT = 2.0**53


def of_blocks(low: Tensor, high: Tensor) -> Interval:
    """Bounds of exact minima and maxima: NaN, and integers that float64 does not hold, are open."""
    return _opened(low.to(torch.float64), high.to(torch.float64), low.dtype)


def unknown(dtype: torch.dtype, device: torch.device) -> Interval:
    """Any value of a dtype."""
    limit = 1.0 if dtype == torch.bool else math.inf
    low = 0.0 if dtype == torch.bool else -math.inf
    return (
        torch.full((1, 1, 1, 1), low, dtype=torch.float64, device=device),
        torch.full((1, 1, 1, 1), limit, dtype=torch.float64, device=device),
    )


def literal(value: float, device: torch.device) -> Interval:
    """A number."""
    both = torch.full((1, 1, 1, 1), float(value), dtype=torch.float64, device=device)
    return both, both


def result(name: str, args: list[Any], kwargs: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Interval:
    """Bounds of the operator ``name`` over operands that are intervals (or literals that are no numbers).

    Args:
        name: operator and overload, as in a program.
        args, kwargs: operands.
        dtype: that of the result.
        device: where unknown bounds are made.
    """
    short = name.partition(".")[0].removeprefix("aten::")
    function = _FUNCTIONS.get(short) or (_BITWISE.get(short) if dtype == torch.bool else None)
    if function is None or any(key != "dtype" for key in kwargs):
        return unknown(dtype, device)
    found = _as_truth(args[0]) if short == "to" and dtype == torch.bool else function(*args)
    return unknown(dtype, device) if found is None else _rounded(found, dtype)


def _rounded(value: Interval, dtype: torch.dtype) -> Interval:
    low, high = value
    if dtype == torch.bool:
        return low, high
    if dtype.is_floating_point:
        # Rounding never changes an order, so rounded bounds bound what is rounded.
        return _opened(low.to(dtype).to(torch.float64), high.to(dtype).to(torch.float64), dtype)
    return _opened(low.trunc(), high.trunc(), dtype)


def _opened(low: Tensor, high: Tensor, dtype: torch.dtype) -> Interval:
    lost = low.isnan() | high.isnan()
    if not dtype.is_floating_point and dtype != torch.bool:
        # Beyond its range an integer wraps around: then nothing is known.
        limit = min(_EXACT, float(torch.iinfo(dtype).max))
        lost = lost | (low < -limit) | (high > limit)
    return low.masked_fill(lost, -math.inf), high.masked_fill(lost, math.inf)


def _truth(must: Tensor, may: Tensor) -> Interval:
    return must.to(torch.float64), may.to(torch.float64)


def _as_truth(x: Interval) -> Interval:
    """Whether a number is not zero."""
    return _truth((x[0] > 0) | (x[1] < 0), ~((x[0] == 0) & (x[1] == 0)))


def _closed(*values: Interval) -> Tensor:
    """Open bounds may hide NaN, of which no comparison is true."""
    finite = [bound.isfinite() for value in values for bound in value]
    return finite[0] & finite[1] & finite[2] & finite[3]


def _less(a: Interval, b: Interval) -> Interval:
    return _truth((a[1] < b[0]) & _closed(a, b), a[0] < b[1])


def _less_equal(a: Interval, b: Interval) -> Interval:
    return _truth((a[1] <= b[0]) & _closed(a, b), a[0] <= b[1])


def _equal(a: Interval, b: Interval) -> Interval:
    same = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0]) & _closed(a, b)
    return _truth(same, (a[0] <= b[1]) & (b[0] <= a[1]))


def _not(x: Interval) -> Interval:
    truth = _as_truth(x)
    return 1 - truth[1], 1 - truth[0]


def _and(a: Interval, b: Interval) -> Interval:
    a, b = _as_truth(a), _as_truth(b)
    return torch.minimum(a[0], b[0]), torch.minimum(a[1], b[1])


def _or(a: Interval, b: Interval) -> Interval:
    a, b = _as_truth(a), _as_truth(b)
    return torch.maximum(a[0], b[0]), torch.maximum(a[1], b[1])


def _xor(a: Interval, b: Interval) -> Interval:
    return _not(_equal(_as_truth(a), _as_truth(b)))


def _add(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


def _sub(a: Interval, b: Interval) -> Interval:
    return a[0] - b[1], a[1] - b[0]


def _mul(a: Interval, b: Interval) -> Interval:
    corners = torch.stack(torch.broadcast_tensors(*(x * y for x in a for y in b)))
    # Zero times an open bound: zero, as long as the other factor is a number; otherwise it is open anyway.
    lost = corners.isnan().any(0)
    low, high = corners.amin(0), corners.amax(0)
    return low.masked_fill(lost, -math.inf), high.masked_fill(lost, math.inf)


def _neg(a: Interval) -> Interval:
    return -a[1], -a[0]


def _abs(a: Interval) -> Interval:
    apart = torch.maximum(a[0], -a[1]).clamp(min=0)
    return apart, torch.maximum(-a[0], a[1])


def _where(condition: Interval, a: Interval, b: Interval) -> Interval:
    must, may = (x > 0 for x in _as_truth(condition))
    low = torch.where(must, a[0], torch.where(may, torch.minimum(a[0], b[0]), b[0]))
    high = torch.where(must, a[1], torch.where(may, torch.maximum(a[1], b[1]), b[1]))
    return low, high


def _minimum(a: Interval, b: Interval) -> Interval:
    return _if_closed(a, b, torch.minimum(a[0], b[0]), torch.minimum(a[1], b[1]))


def _maximum(a: Interval, b: Interval) -> Interval:
    return _if_closed(a, b, torch.maximum(a[0], b[0]), torch.maximum(a[1], b[1]))


def _if_closed(a: Interval, b: Interval, low: Tensor, high: Tensor) -> Interval:
    """Open where an operand may be NaN: then the result may be, whatever the other one is."""
    lost = ~_closed(a, b)
    return low.masked_fill(lost, -math.inf), high.masked_fill(lost, math.inf)


def _clamp(x: Interval, low: Interval | None = None, high: Interval | None = None) -> Interval:
    x = x if low is None else _maximum(x, low)
    return x if high is None else _minimum(x, high)


def _floor_divide(a: Interval, b: Interval) -> Interval | None:
    """By a positive number, of integers below 2**53: then float64 divides and floors exactly enough."""
    corners = torch.stack(torch.broadcast_tensors(*(torch.floor(x / y) for x in a for y in b)))
    lost = (b[0] <= 0) | ~b[1].isfinite() | (_abs(a)[1] >= _EXACT / 2) | corners.isnan().any(0)
    low, high = corners.amin(0), corners.amax(0)
    return low.masked_fill(lost, -math.inf), high.masked_fill(lost, math.inf)


def _cast(x: Interval, *_: Any) -> Interval:
    return x


def _zeros(x: Interval, *_: Any) -> Interval:
    return torch.zeros_like(x[0]), torch.zeros_like(x[0])


def _ones(x: Interval, *_: Any) -> Interval:
    return torch.ones_like(x[0]), torch.ones_like(x[0])


_FUNCTIONS: dict[str, Callable[..., Interval | None]] = {
    "lt": _less, "gt": lambda a, b: _less(b, a), "le": _less_equal, "ge": lambda a, b: _less_equal(b, a),
    "eq": _equal, "ne": lambda a, b: _not(_equal(a, b)), "logical_not": _not, "logical_and": _and, "logical_or": _or,
    "logical_xor": _xor, "add": _add, "sub": _sub, "rsub": lambda a, b: _sub(b, a), "mul": _mul, "neg": _neg,
    "abs": _abs, "where": _where, "masked_fill": lambda x, hidden, value: _where(hidden, value, x),
    "minimum": _minimum, "maximum": _maximum, "clamp": _clamp, "floor_divide": _floor_divide, "to": _cast,
    "zeros_like": _zeros, "ones_like": _ones,
}  # fmt: skip
# On integers these mix bits, of which bounds say nothing.
_BITWISE: dict[str, Callable[..., Interval | None]] = {
    "bitwise_and": _and, "__and__": _and, "bitwise_or": _or, "__or__": _or, "bitwise_xor": _xor, "__xor__": _xor,
    "bitwise_not": _not,
}  # fmt: skip
