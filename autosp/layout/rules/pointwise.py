"""Operators that treat every element alone: arithmetic, activations, casts, comparisons, selections by mask."""

from __future__ import annotations

import torch

from ..call import OpCall, Refusal, Strategy, Value
from ..placement import REPLICATE, Placement, Shard, known_equal
from ..registry import register_pointwise_rule, register_rule

aten = torch.ops.aten


def out_dim(value: Value, ndim: int, dim: int) -> int:
    """Dimension of a broadcast result of ``ndim`` dimensions that ``dim`` of ``value`` meets."""
    return dim + ndim - value.ndim


def is_broadcast(value: Value, dim: int, size) -> bool:
    """``value`` is stretched along the result's dimension that its own ``dim`` would meet (negative: has none)."""
    return dim < 0 or (known_equal(value.shape[dim], 1) and not known_equal(size, 1))


def align(value: Value, shape, cut: Shard) -> Placement:
    """The layout that ``value`` needs so that its rows meet those of a result of ``shape`` cut as ``cut``."""
    dim = cut.dim - (len(shape) - value.ndim)
    if is_broadcast(value, dim, shape[cut.dim]):
        return REPLICATE
    return cut.at(dim)


def find_cut(values: list[Value], shape) -> Shard | None:
    """The cut of a broadcast result: that of the first operand that is cut along a dimension of its own."""
    for value in values:
        shard = value.shard
        if shard is None:
            continue
        dim = out_dim(value, len(shape), shard.dim)
        if is_broadcast(value, shard.dim, shape[dim]):
            continue
        return shard.at(dim)
    return None


@register_pointwise_rule
@register_rule(
    aten.to, aten._to_copy, aten.type_as, aten.contiguous, aten.clone, aten.detach, aten.alias, aten.lift_fresh_copy,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf,
    aten.where.Scalar, aten.gelu, aten.silu, aten.relu, aten.zeros_like, aten.ones_like, aten.full_like,
    aten.empty_like,
    aten.clamp, aten.clamp_min, aten.clamp_max, aten.pow, aten.isin.Tensor_Scalar, aten.result_type,
)  # fmt: skip
def pointwise_rule(call: OpCall) -> Strategy:
    """The result is cut like the first operand that is cut; whole operands are cut to its rows, others are
    exchanged.
    """
    if isinstance(call.out, (list, tuple)):
        raise Refusal("a pointwise operator with several results has no rule")
    values = [value for _, value in call.values()]
    cut = find_cut(values, call.out_shape)
    if cut is None:
        return Strategy()
    if call.homing and len({out_dim(v, len(call.out_shape), v.shard.dim) for v in values if v.shard is not None}) > 1:
        raise Refusal("token dimensions that are set against each other, as in a mask")
    inputs = {name: align(value, call.out_shape, cut) for name, value in call.values()}
    return Strategy(inputs=inputs, output=cut)


def where_it_is(value: Value) -> Placement:
    """The layout of an operand of which dtype and device alone are read; a partial sum may be held in a wider dtype."""
    return value.shard or REPLICATE


@register_rule(aten.type_as.default, aten.to.other)
def cast_like_rule(call: OpCall) -> Strategy:
    """The other operand gives dtype and device; its sizes need not fit, and its cut says nothing about the result."""
    placement = where_it_is(call["self"])
    return Strategy(inputs={"self": placement, "other": where_it_is(call["other"])}, output=placement)
