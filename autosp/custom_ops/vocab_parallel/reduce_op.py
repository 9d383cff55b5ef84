"""``autosp::vocab_sum_over_group``: a sum over the ranks that share the tokens, whose adjoint is the identity.

Every rank computes the same total and backpropagates the gradient of that one total to its own terms, so the adjoint
must not sum again (an all-reduce whose backward is an all-reduce would scale the gradient by the group's size).
"""

from __future__ import annotations

import torch

from .groups import gather_packed, sum_in_rank_order
from .registry import register


def _sum(value, group):
    """Sum a scalar over the named group, in rank order and with the same bits on every rank."""
    return sum_in_rank_order(gather_packed(value.reshape(1), group)).reshape(())


vocab_sum_over_group = register(
    "vocab_sum_over_group(Tensor value, str group) -> Tensor",
    _sum,
    lambda value, group: value.new_empty(()),
    lambda ctx, grad: (grad, None),
    lambda ctx, inputs, output: None,
)


def sum_over_group(value: torch.Tensor, group: str) -> torch.Tensor:
    """``value`` (a scalar tensor) summed over the named group; itself for no group."""
    return vocab_sum_over_group(value, group) if group else value
