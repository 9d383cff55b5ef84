"""Softmax and log-softmax of logits that are sharded over the vocabulary, results sharded alike.

With ``z`` the logits and ``m`` their maximum, ``s = sum exp(z - m)`` over the whole vocabulary,
``log p = (z - m) - log s``. Two all-reduces of one number a row forward, one backward:

    d log_softmax:  dz_j = g_j - p_j sum_i g_i
    d softmax:      dz_j = p_j (g_j - sum_i g_i p_i)

as ``torch.nn.functional`` has them, the sums over the group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import define

_c10d = torch.ops._c10d_functional


def _reduce(x: Tensor, kind: str, group: str) -> Tensor:
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), kind, group))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _forward(x: Tensor, log: bool, dtype: torch.dtype, group: str) -> Tensor:
    z = _wide(x)
    lowest = z.new_full([*z.shape[:-1], 1], float("-inf"))
    top = _reduce(z.amax(-1, keepdim=True) if z.shape[-1] else lowest, "max", group)
    z = z - top
    total = _reduce(z.exp().sum(-1, keepdim=True), "sum", group)
    return (z - total.log() if log else z.exp() / total).to(dtype)


class _VocabSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log, dtype, group):
        out = _forward(x, log, dtype, group)
        ctx.save_for_backward(out)
        ctx.log, ctx.dtype, ctx.group = log, x.dtype, group
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        grad, out = _wide(grad), _wide(out)
        if ctx.log:
            grad = grad - out.exp() * _reduce(grad.sum(-1, keepdim=True), "sum", ctx.group)
        else:
            grad = out * (grad - _reduce((grad * out).sum(-1, keepdim=True), "sum", ctx.group))
        return grad.to(ctx.dtype), None, None, None


vocab_softmax = define(
    "vocab_softmax(Tensor x, bool log, ScalarType dtype, str group) -> Tensor",
    forward=_forward,
    fake=lambda x, log, dtype, group: torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format),
    autograd=lambda *args: _VocabSoftmax.apply(*args),
)
vocab_softmax.__doc__ = """Softmax, or with ``log`` log-softmax, over the last dimension of shards of any lengths.

``x`` is ``[..., columns]``, this rank's columns (none is fine) of a vocabulary that ``group`` shares; the result has
its shape and ``dtype``. Computed in fp32, fp64 for fp64.
"""
