"""Which operators of kernel libraries are attention, and how they take their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

LAYOUTS = ("bshd", "bhsd", "shd")


@dataclass(frozen=True)
class Kernel:
    """An attention operator.

    Args:
        names: of its queries, keys and values.
        layout: order of their dimensions; "shd" is one packed row of tokens.
        packed_by: an argument that, when given, makes the layout "shd".
        by_head: arguments whose last dimension is heads of q.
        dropout: the argument that is a probability of dropout; empty: none.
    """

    names: tuple[str, str, str] = ("q", "k", "v")
    layout: str = "bshd"
    packed_by: str = ""
    by_head: tuple[str, ...] = ()
    dropout: str = ""

    def knows(self, name: str) -> bool:
        """A tensor of this name is cut to the heads of a rank, or speaks of rows of the batch or documents alone."""
        return name in self.names or name in self.by_head or name in _NOT_BY_HEAD

    def layout_of(self, bound: Mapping[str, Any]) -> str:
        return "shd" if self.packed_by and bound.get(self.packed_by) is not None else self.layout


# Where documents and rows of the batch begin and end.
_NOT_BY_HEAD = frozenset(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k"))
# ALiBi, and sinks under the names of the forks that have them.
_BY_HEAD = ("alibi_slopes", "s_aux", "sinks", "learnable_sink")
_REGISTERED: dict[Any, Kernel] = {}
# FlashAttention 2 and 3: their packages, and their kernels from the Hub, use these names in namespaces of their own.
_BY_NAME = {
    "_flash_attn_forward": Kernel(packed_by="cu_seqlens_q", by_head=_BY_HEAD, dropout="dropout_p"),
    "_flash_attn_varlen_forward": Kernel(layout="shd", by_head=_BY_HEAD, dropout="dropout_p"),
}
_NAMESPACES = ("flash_attn", "flashattn")


def remember_kernel(target: Any, kernel: Kernel) -> None:
    _REGISTERED[target] = kernel


def find_kernel(target: Any) -> Kernel | None:
    """What is known of an operator that is attention; None for any other."""
    if target in _REGISTERED:
        return _REGISTERED[target]
    if not isinstance(target, torch._ops.OpOverload):
        return None
    namespace, _, name = target._schema.name.partition("::")
    kernel = _BY_NAME.get(name) if any(part in namespace for part in _NAMESPACES) else None
    arguments = {argument.name for argument in target._schema.arguments}
    return kernel if kernel is not None and arguments.issuperset(kernel.names) else None
