"""``autosp::vocab_jsd``: the generalised Jensen-Shannon divergence of two vocabulary-parallel distributions.

With student P, teacher Q and ``M = (1 - beta) P + beta Q`` (the convention of generalised knowledge distillation,
Agarwal et al. 2024, equation 1)

    JSD = beta KL(Q || M) + (1 - beta) KL(P || M)

Gradient. ``dJSD/dP_j = (1 - beta)(log(P_j/M_j) + 1) - (1 - beta)(beta Q_j + (1 - beta) P_j)/M_j = (1 - beta)
log(P_j/M_j)``: the terms that come through M cancel. With ``dP_i/dz_j = P_i([i=j] - P_j)``

    dJSD/dz_p,j = (1 - beta) P_j (log(P_j/M_j) - KL(P || M)),    dJSD/dz_q,j = beta Q_j (log(Q_j/M_j) - KL(Q || M))

M needs both normalisations, so the forward reads the logits twice: statistics (one gather over the group), then the
two sums (one more). The backward needs no collective.
"""

from __future__ import annotations

import torch

from ..dispatch import triton_usable
from .divergence_plain import combine_kl_stats, jsd_backward, local_jsd_sums, local_kl_stats
from .groups import gather_packed, sum_in_rank_order
from .kl_op import _OPTIONS, empty_gradients, pair_options
from .row_stats_op import refuse_double_backward
from .rows import accumulator_dtype, count_rows


@torch.library.custom_op(
    "autosp::vocab_jsd",
    mutates_args=(),
    schema=f"(Tensor p, Tensor q, float beta, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def vocab_jsd(p, q, beta, inverse_rows, inverse, softcap, start, end, group):
    """Returns ``(JSD [N], sums [2, N] = KL(P || M), KL(Q || M), saved [4, N])``; beta strictly between 0 and 1."""
    options = pair_options(p, inverse_rows, inverse, softcap, start, end, group)
    if triton_usable(p, q):
        from .kernels import jsd, kl

        _, saved = kl.combine_kl_stats(gather_packed(kl.local_kl_stats(p, q, options), group), options)
        local = jsd.local_jsd_sums(p, q, saved, beta, options)
    else:
        _, saved = combine_kl_stats(gather_packed(local_kl_stats(p, q, options), group), options)
        local = local_jsd_sums(p, q, saved, beta, options)
    sums = sum_in_rank_order(gather_packed(local.flatten(), group)).view(local.shape)
    return (1.0 - beta) * sums[0] + beta * sums[1], sums, saved


@vocab_jsd.register_fake
def _(p, q, *rest):
    rows, dtype = count_rows(p), accumulator_dtype(p, q)
    return tuple(p.new_empty(shape, dtype=dtype) for shape in ((rows,), (2, rows), (4, rows)))


@torch.library.custom_op(
    "autosp::vocab_jsd_backward",
    mutates_args=(),
    schema="(Tensor p, Tensor q, Tensor sums, Tensor saved, Tensor g, float beta, bool need_p, bool need_q,"
    f" {_OPTIONS})"
    " -> (Tensor, Tensor)",
)
def vocab_jsd_backward(p, q, sums, saved, g, beta, need_p, need_q, inverse_rows, inverse, softcap, start, end, group):
    """Gradients of the two logits, contiguous, in their dtypes; size 0 where not needed."""
    options = pair_options(p, inverse_rows, inverse, softcap, start, end, group)
    grads = empty_gradients(p, q, need_p, need_q)
    wanted = (grads[0] if need_p else None, grads[1] if need_q else None)
    if triton_usable(p, q):
        from .kernels import jsd

        jsd.jsd_backward(p, q, sums, saved, g.contiguous(), beta, options, *wanted)
    else:
        jsd_backward(p, q, sums, saved, g.contiguous(), beta, options, *wanted)
    return grads


@vocab_jsd_backward.register_fake
def _(p, q, sums, saved, g, beta, need_p, need_q, *rest):
    return p.new_empty(p.shape if need_p else (0,)), q.new_empty(q.shape if need_q else (0,))


def _setup_context(ctx, inputs, output):
    p, q, beta, inverse_rows, *scalars = inputs
    _, sums, saved = output
    ctx.mark_non_differentiable(sums, saved)
    ctx.save_for_backward(p, q, sums, saved, inverse_rows)
    ctx.beta, ctx.scalars = beta, scalars


def _backward(ctx, g_jsd, _g_sums, _g_saved):
    p, q, sums, saved, inverse_rows = ctx.saved_tensors
    need_p, need_q = ctx.needs_input_grad[:2]
    grads = vocab_jsd_backward(p, q, sums, saved, g_jsd, ctx.beta, need_p, need_q, inverse_rows, *ctx.scalars)
    return (grads[0] if need_p else None, grads[1] if need_q else None, *([None] * 7))


vocab_jsd.register_autograd(_backward, setup_context=_setup_context)
vocab_jsd_backward.register_autograd(refuse_double_backward, setup_context=lambda ctx, inputs, output: None)
