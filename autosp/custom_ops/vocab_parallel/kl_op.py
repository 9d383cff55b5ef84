"""``autosp::vocab_kl``: KL(P || Q) of two vocabulary-parallel distributions from one read of each, and its gradients.

    KL = sum_j P_j (log P_j - log Q_j)
       = k * acc / s_p - (log s_p - log s_q),   acc = sum_j exp(k(u_p - m_p)) ((u_p - m_p) - (u_q - m_q))

with the notation of ``row_stats_plain``; both sides are centred on their own maximum, so equal inputs give exactly 0
and a common offset loses nothing. Gradients, from ``dP_i/dz_j = P_i([i=j] - P_j)``:

    dKL/dz_p,j = P_j ((log P_j - log Q_j) - KL),     dKL/dz_q,j = Q_j - P_j

(the first is the policy-gradient form of the reverse KL, the second that of cross entropy with soft targets). They
need the row's own statistics only: no collective in the backward. A row whose upstream gradient is zero gets zeros.
"""

from __future__ import annotations

import torch

from ..dispatch import triton_usable
from .divergence_plain import PairOptions, combine_kl_stats, kl_backward, local_kl_stats
from .groups import gather_packed, shard_bounds
from .row_stats_op import refuse_double_backward
from .rows import accumulator_dtype, count_rows

_OPTIONS = "Tensor? inverse_rows, float inverse, float softcap, int start, int end, str group"


def pair_options(p, inverse_rows, inverse, softcap, start, end, group) -> PairOptions:
    """Options of a pair operator; the columns of a shard without bounds are all valid."""
    _, valid = shard_bounds(p.shape[-1], start, end, -1, group)
    return PairOptions(inverse_rows, inverse, softcap, valid)


@torch.library.custom_op(
    "autosp::vocab_kl", mutates_args=(), schema=f"(Tensor p, Tensor q, {_OPTIONS}) -> (Tensor, Tensor)"
)
def vocab_kl(p, q, inverse_rows, inverse, softcap, start, end, group):
    """Returns ``(KL(P || Q) [N], saved [4, N])``; ``p`` and ``q`` are ``[..., V_local]`` logits."""
    options = pair_options(p, inverse_rows, inverse, softcap, start, end, group)
    if triton_usable(p, q):
        from .kernels import kl as kernels

        return kernels.combine_kl_stats(gather_packed(kernels.local_kl_stats(p, q, options), group), options)
    return combine_kl_stats(gather_packed(local_kl_stats(p, q, options), group), options)


@vocab_kl.register_fake
def _(p, q, *rest):
    rows, dtype = count_rows(p), accumulator_dtype(p, q)
    return p.new_empty(rows, dtype=dtype), p.new_empty(4, rows, dtype=dtype)


def empty_gradients(p: torch.Tensor, q: torch.Tensor, need_p: bool, need_q: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised contiguous gradients; of size 0 where none is wanted."""
    grads = [
        torch.empty(t.shape if needed else (0,), dtype=t.dtype, device=t.device)
        for t, needed in ((p, need_p), (q, need_q))
    ]
    return grads[0], grads[1]


@torch.library.custom_op(
    "autosp::vocab_kl_backward",
    mutates_args=(),
    schema="(Tensor p, Tensor q, Tensor kl, Tensor saved, Tensor g, bool need_p, bool need_q,"
    f" {_OPTIONS}) -> (Tensor, Tensor)",
)
def vocab_kl_backward(p, q, kl, saved, g, need_p, need_q, inverse_rows, inverse, softcap, start, end, group):
    """Gradients of the two logits, contiguous, in their dtypes; size 0 where not needed."""
    options = pair_options(p, inverse_rows, inverse, softcap, start, end, group)
    grads = empty_gradients(p, q, need_p, need_q)
    wanted = (grads[0] if need_p else None, grads[1] if need_q else None)
    if triton_usable(p, q):
        from .kernels import kl as kernels

        kernels.kl_backward(p, q, kl, saved, g.contiguous(), options, *wanted)
    else:
        kl_backward(p, q, kl, saved, g.contiguous(), options, *wanted)
    return grads


@vocab_kl_backward.register_fake
def _(p, q, kl, saved, g, need_p, need_q, *rest):
    return p.new_empty(p.shape if need_p else (0,)), q.new_empty(q.shape if need_q else (0,))


def _setup_context(ctx, inputs, output):
    p, q, inverse_rows, *scalars = inputs
    kl, saved = output
    ctx.mark_non_differentiable(saved)
    ctx.save_for_backward(p, q, kl, saved, inverse_rows)
    ctx.scalars = scalars


def _backward(ctx, g_kl, _g_saved):
    p, q, kl, saved, inverse_rows = ctx.saved_tensors
    need_p, need_q = ctx.needs_input_grad[:2]
    grad_p, grad_q = vocab_kl_backward(p, q, kl, saved, g_kl, need_p, need_q, inverse_rows, *ctx.scalars)
    return (grad_p if need_p else None, grad_q if need_q else None, *([None] * 6))


vocab_kl.register_autograd(_backward, setup_context=_setup_context)
vocab_kl_backward.register_autograd(refuse_double_backward, setup_context=lambda ctx, inputs, output: None)
