"""Operators that make tensors from numbers, and those that only look at sizes: whole on every rank."""

from __future__ import annotations

import torch

from ..call import OpCall, Strategy
from ..registry import register_rule
from .pointwise import where_it_is

aten = torch.ops.aten


@register_rule(
    aten.arange, aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.eye,
    aten.scalar_tensor, aten.linspace, aten.tril_indices, aten.triu_indices, aten.lift_fresh,
)  # fmt: skip
def factory_rule(call: OpCall) -> Strategy:
    """What is made from sizes alone is the same on every rank: positions made inside the model are global positions."""
    return Strategy()


@register_rule(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty)
def new_rule(call: OpCall) -> Strategy:
    """Takes dtype and device of its operand, not its elements: whole, whatever the layout of the operand."""
    return Strategy(inputs={"self": where_it_is(call["self"])})


@register_rule(aten._assert_async, aten._assert_tensor_metadata, aten._assert_scalar)
def assert_rule(call: OpCall) -> Strategy:
    """Assertions of the model on whole values."""
    return Strategy(output=None)
