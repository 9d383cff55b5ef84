"""Positions and comparisons of positions, read out of a graph.

An integer tensor made from ``arange`` by views, slices, shifts and differences is an affine form of its own indices; a
comparison of two such forms is a linear inequality over the indices of the result. Nothing is run on values: what is
not provably of this form is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .placement import IntLike, known_equal, settled

aten = torch.ops.aten


@dataclass(frozen=True)
class Affine:
    """``constant + sum(coefficients[d] * index[d])`` over the dimensions of a tensor, counted from the end (-1, -2,
    ...).
    """

    coefficients: tuple[tuple[int, int], ...]
    constant: IntLike

    @classmethod
    def of(cls, coefficients: Mapping[int, int], constant: IntLike) -> Affine:
        kept = tuple(sorted((d, a) for d, a in coefficients.items() if a != 0))
        return cls(kept, settled(constant))

    def minus(self, other: Affine) -> Affine:
        merged = dict(self.coefficients)
        for dim, a in other.coefficients:
            merged[dim] = merged.get(dim, 0) - a
        return Affine.of(merged, self.constant - other.constant)

    def shifted(self, amount: IntLike) -> Affine:
        return Affine.of(dict(self.coefficients), self.constant + amount)

    def negated(self) -> Affine:
        return Affine.of({d: -a for d, a in self.coefficients}, -self.constant)

    def moved(self, place: Mapping[int, int]) -> Affine | None:
        """The same form with each dimension ``d`` renamed to ``place[d]``; None when a used dimension goes away."""
        if any(d not in place for d, _ in self.coefficients):
            return None
        return Affine.of({place[d]: a for d, a in self.coefficients}, self.constant)


@dataclass(frozen=True)
class Where:
    """A boolean tensor that is true exactly where every one of ``conditions`` is not negative."""

    conditions: tuple[Affine, ...]


def _shape(node: Any) -> Sequence[IntLike] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.shape if isinstance(value, torch.Tensor) else None


def _view_places(node: fx.Node) -> dict[int, int] | None:
    """For views that keep, add, drop or reorder whole dimensions: input dimension -> result dimension, from the end."""
    source, result = _shape(node.args[0]), _shape(node)
    if source is None or result is None:
        return None
    rank = len(source)
    name = node.target._schema.name
    if name in (
        "aten::expand",
        "aten::to",
        "aten::_to_copy",
        "aten::contiguous",
        "aten::clone",
        "aten::slice",
        "aten::alias",
        "aten::narrow",
    ):
        return {d - rank: d - rank for d in range(rank)}
    if name == "aten::unsqueeze":
        at = node.args[1] % len(result)
        return {d - rank: (d if d < at else d + 1) - len(result) for d in range(rank)}
    if name in ("aten::squeeze", "aten::view", "aten::reshape"):
        return _same_sizes(source, result)
    if name == "aten::transpose":
        i, j = int(node.args[1]) % rank, int(node.args[2]) % rank
        swap = {i: j, j: i}
        return {d - rank: swap.get(d, d) - rank for d in range(rank)}
    return None


def _same_sizes(source: Sequence[IntLike], result: Sequence[IntLike]) -> dict[int, int] | None:
    """A reshape that only adds or drops dimensions of size 1."""
    kept = [d for d, size in enumerate(source) if not known_equal(size, 1)]
    shown = [d for d, size in enumerate(result) if not known_equal(size, 1)]
    if len(kept) != len(shown) or not all(known_equal(source[a], result[b]) for a, b in zip(kept, shown, strict=True)):
        return None
    return {a - len(source): b - len(result) for a, b in zip(kept, shown, strict=True)}


def _drop_unit(form: Affine, shape: Sequence[IntLike]) -> Affine:
    """Dimensions of size 1 have index 0 only."""
    return Affine.of(
        {d: a for d, a in form.coefficients if not known_equal(shape[d], 1)},
        form.constant,
    )


def affine_of(node: Any) -> Affine | None:
    """The affine form of an integer tensor or number, or None."""
    if isinstance(node, (int, torch.SymInt)) and not isinstance(node, bool):
        return Affine.of({}, node)
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        return Affine.of({}, value) if isinstance(value, (int, torch.SymInt)) else None
    value = node.meta.get("val")
    if isinstance(value, (int, torch.SymInt)):
        return Affine.of({}, value)
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64):
        return None  # positions and their differences leave the range of narrower integers
    form = _affine_call(node)
    return None if form is None else _drop_unit(form, value.shape)


def _affine_call(node: fx.Node) -> Affine | None:
    name = node.target._schema.name
    if name == "aten::arange":
        return _arange(node)
    if name in ("aten::add", "aten::sub") and node.kwargs.get("alpha", 1) == 1 and len(node.args) == 2:
        left, right = affine_of(node.args[0]), affine_of(node.args[1])
        if left is None or right is None:
            return None
        return left.minus(right if name == "aten::sub" else right.negated())
    if name == "aten::cat":
        return _joined(node)
    if name == "aten::cumsum":
        return _running_sum(node)
    if name == "aten::index":
        return _looked_up(node)
    places = _view_places(node)
    inner = affine_of(node.args[0]) if places is not None else None
    if inner is None or places is None:
        return None
    if name in ("aten::slice", "aten::narrow"):
        inner = _sliced(node, inner)
    return inner.moved(places) if inner is not None else None


def _looked_up(node: fx.Node) -> Affine | None:
    """``table[i, j]`` with an index for every dimension: the table's form at the forms of the indices.

    An index that may be negative counts from the end, so its form must have no term below zero.
    """
    table, indices = affine_of(node.args[0]), node.args[1]
    if table is None or not table.coefficients:
        return table
    if not isinstance(indices, (list, tuple)) or len(indices) != len(_shape(node.args[0]) or ()):
        return None
    if any(_shape(i) is None or i.meta["val"].dtype not in (torch.int32, torch.int64) for i in indices):
        return None  # tensors of booleans and bytes choose by being true
    result = Affine.of({}, table.constant)
    for dim, slope in table.coefficients:
        at = affine_of(indices[dim])
        if at is None or not isinstance(at.constant, int) or min([at.constant, *dict(at.coefficients).values()]) < 0:
            return None
        scaled = Affine.of({d: -slope * a for d, a in at.coefficients}, -slope * at.constant)
        result = result.minus(scaled)
    return result


def _joined(node: fx.Node) -> Affine | None:
    """Pieces that continue one line, such as ``cat([p[:1] - 1, p])`` of positions ``p``."""
    shape, pieces = _shape(node), node.args[0]
    if shape is None or not isinstance(pieces, (list, tuple)):
        return None
    joined: Any = node.args[1] if len(node.args) > 1 else 0
    dim = joined % len(shape) - len(shape)
    known = [(form, _shape(piece)) for piece in pieces if (form := affine_of(piece)) is not None]
    # In a piece of one element the slope does not show.
    slopes = {dict(form.coefficients).get(dim, 0) for form, sizes in known if sizes and not known_equal(sizes[dim], 1)}
    if len(known) != len(pieces) or len(slopes) != 1:
        return None
    slope, offset, lines = slopes.pop(), 0, []
    for form, sizes in known:
        rest = {d: a for d, a in form.coefficients if d != dim}
        lines.append(Affine.of({**rest, dim: slope}, form.constant - slope * offset))
        offset = offset + (sizes or ())[dim]
    first = lines[0]
    same = all(x.coefficients == first.coefficients and known_equal(x.constant, first.constant) for x in lines)
    return first if same else None


def _running_sum(node: fx.Node) -> Affine | None:
    """The running sum of what is nowhere true, or zero everywhere."""
    source = node.args[0]
    if _is_bool(source):
        proof = where_of(source)
        return Affine.of({}, 0) if proof is not None and NEVER in proof.conditions else None
    zero = Affine.of({}, 0)
    return zero if affine_of(source) == zero else None


def _arange(node: fx.Node) -> Affine | None:
    overload = node.target._overloadname
    start = affine_of(node.args[0]) if overload in ("start", "start_step") else Affine.of({}, 0)
    step = node.args[2] if overload == "start_step" and len(node.args) > 2 else 1
    if start is None or not isinstance(step, int):
        return None
    return Affine.of({-1: step}, start.constant)


def _sliced(node: fx.Node, form: Affine) -> Affine | None:
    rank = len(_shape(node.args[0]) or ())
    dim: int = (node.args[1] if len(node.args) > 1 else 0) % rank - rank
    start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    step = node.args[4] if len(node.args) > 4 else 1
    coefficients = dict(form.coefficients)
    if dim not in coefficients:
        return form
    if not isinstance(start, int) or start < 0 or step != 1:
        return None
    return Affine.of(coefficients, form.constant + coefficients[dim] * start)


NEVER = Affine.of({}, -1)
_COMPARISONS = {"aten::ge": (1, 0), "aten::gt": (1, -1), "aten::le": (-1, 0), "aten::lt": (-1, -1)}


def where_of(node: Any) -> Where | None:
    """The conditions under which a boolean tensor is true, or None when they are not comparisons of positions."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target._schema.name
    if name in _COMPARISONS:
        left, right = affine_of(node.args[0]), affine_of(node.args[1])
        if left is None or right is None:
            return None
        sign, shift = _COMPARISONS[name]
        difference = left.minus(right)
        return Where(((difference if sign > 0 else difference.negated()).shifted(shift),))
    if name in ("aten::eq", "aten::ne"):
        return _equal(node, name == "aten::ne")
    if name in ("aten::bitwise_and", "aten::logical_and", "aten::__and__", "aten::mul"):
        one, other = where_of(node.args[0]), where_of(node.args[1])
        return Where(one.conditions + other.conditions) if one is not None and other is not None else None
    if _is_all_true(node):
        return Where(())
    if name == "aten::tril":
        return _triangle(node)
    places = _view_places(node)
    shown = where_of(node.args[0]) if places is not None and _is_bool(node.args[0]) else None
    if shown is not None and name == "aten::slice":
        shown = _all_known([_sliced(node, form) for form in shown.conditions])
    if shown is None or places is None:
        return None
    return _all_known([form.moved(places) for form in shown.conditions])


def _equal(node: fx.Node, negated: bool) -> Where | None:
    """Equality of two forms: both inequalities; of inequality only what is the same for all indices is known."""
    left, right = affine_of(node.args[0]), affine_of(node.args[1])
    if left is None or right is None:
        return None
    difference = left.minus(right)
    if not negated:
        return Where((difference, difference.negated()))
    if difference.coefficients or not isinstance(difference.constant, int):
        return None
    return Where(() if difference.constant else (NEVER,))


def _all_known(conditions: Sequence[Affine | None]) -> Where | None:
    """The conditions together, or None when one of them is unknown: a missing one would show what is hidden."""
    known = tuple(c for c in conditions if c is not None)
    return Where(known) if len(known) == len(conditions) else None


def _is_bool(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _is_all_true(node: fx.Node) -> bool:
    name = node.target._schema.name
    if not _is_bool(node):
        return False
    full = name in ("aten::full", "aten::new_full") and node.args[-1] is True
    return full or name in ("aten::ones", "aten::new_ones", "aten::ones_like")


def _triangle(node: fx.Node) -> Where | None:
    inner = where_of(node.args[0])
    diagonal = node.args[1] if len(node.args) > 1 else 0
    if inner is None or not isinstance(diagonal, int):
        return None
    return Where((*inner.conditions, Affine.of({-2: 1, -1: -1}, diagonal)))
