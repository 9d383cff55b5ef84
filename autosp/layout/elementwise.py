"""Operators that treat every element alone, so that they mean the same on any block of a broadcast result."""

from __future__ import annotations

from typing import Any

import torch

# torch does not tag every overload of these.
_UNTAGGED = frozenset(
    f"aten::{name}"
    for name in (
        "where", "masked_fill", "floor_divide", "to", "_to_copy", "clone", "detach", "alias", "lift_fresh_copy",
        "__and__", "__or__", "__xor__", "and", "or", "not",
    )
)  # fmt: skip


def is_elementwise(target: Any) -> bool:
    """``target`` is a functional operator, drawing nothing, whose result's elements depend on one element of each
    operand.
    """
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or target._schema.name in _UNTAGGED
