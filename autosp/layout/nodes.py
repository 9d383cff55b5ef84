"""Reading nodes of a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .placement import known_equal

FUSION = "autosp_fusion"
"""``node.meta`` key of a cross entropy (or of what replaced it): whether its LM head was fused into it, or why not."""


def argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    """An argument of a call, given by position or by name, or its default."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def keeps_last_dim(node: fx.Node) -> bool:
    """Whether a view, slice or copy of its first argument leaves the last dimension what it is."""
    source, result = node.args[0].meta["val"].shape, node.meta["val"].shape
    return bool(source) and bool(result) and known_equal(source[-1], result[-1])


def is_barred(first: fx.Node, last: fx.Node) -> bool:
    """A write, or the border of a region (no_grad, autocast), lies between: what ``first`` computes must be computed
    where it stands.
    """
    node = first.next
    while node is not last:
        if node.op == "call_function":
            is_operator = isinstance(node.target, torch._ops.OpOverload)
            if is_operator and node.target._schema.is_mutable:
                return True
            if not is_operator and node.meta.get("val") is None:
                return True
        node = node.next
    return False
