"""The loss of a whole sequence from what each rank's tokens contribute."""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import define

_c10d = torch.ops._c10d_functional


def _total(loss_sum: Tensor, weight: Tensor | None, group: str) -> tuple[Tensor, Tensor | None]:
    if weight is None:
        return _c10d.wait_tensor(_c10d.all_reduce(loss_sum.contiguous(), "sum", group)), None
    packed = torch.stack([loss_sum, weight.to(loss_sum.dtype)])
    packed = _c10d.wait_tensor(_c10d.all_reduce(packed, "sum", group))
    return packed[0], packed[1]


def _forward(loss_sum: Tensor, weight: Tensor | None, dtype: torch.dtype, group: str) -> Tensor:
    total, count = _total(loss_sum, weight, group)
    return (total if count is None else total / count).to(dtype, copy=True)


class _AggregateLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss_sum, weight, dtype, group):
        total, count = _total(loss_sum, weight, group)
        ctx.save_for_backward(*(() if count is None else (count,)))
        ctx.dtype = loss_sum.dtype
        return (total if count is None else total / count).to(dtype, copy=True)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.to(ctx.dtype)
        if ctx.saved_tensors:
            grad = grad / ctx.saved_tensors[0]
        return grad, None, None, None


aggregate_loss = define(
    "aggregate_loss(Tensor loss_sum, Tensor? weight, ScalarType dtype, str group) -> Tensor",
    forward=_forward,
    fake=lambda loss_sum, weight, dtype, group: loss_sum.new_empty((), dtype=dtype),
    autograd=lambda *args: _AggregateLoss.apply(*args),
)
aggregate_loss.__doc__ = """The loss over the whole sequence.

``loss_sum`` is the fp32 sum of the losses of this rank's tokens (a scalar) and ``weight`` the fp32 sum of their
weights, or None for a sum reduction. Both are summed over ``group`` in one all-reduce; the result, of dtype
``dtype``, is ``sum(loss_sum) / sum(weight)`` and the same on every rank. Its backward needs no communication: every
rank's tokens see the gradient of the whole loss, ``grad / sum(weight)``, which is never scaled by the size of the
group.
"""
