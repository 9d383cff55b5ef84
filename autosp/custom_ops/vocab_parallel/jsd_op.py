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

from ..dispatch import triton_usable
from .derivatives import first_derivative
from .divergence_plain import jsd_backward, local_jsd_sums
from .groups import gather_packed, sum_in_rank_order
from .kl_op import SETTINGS, empty_gradients, pair_options, pair_statistics
from .registry import register
from .rows import accumulator_dtype


def _jsd(p, q, beta, *settings):
    """Returns ``(JSD [...], sums [2, N] = KL(P || M), KL(Q || M), saved [4, N])``; beta strictly between 0 and 1."""
    options, group = pair_options(p, *settings), settings[-1]
    _, saved = pair_statistics(p, q, options, group)
    if triton_usable(p, q):
        from .kernels import jsd

        local = jsd.local_jsd_sums(p, q, saved, beta, options)
    else:
        local = local_jsd_sums(p, q, saved, beta, options)
    sums = sum_in_rank_order(gather_packed(local.view(-1), group)).view(local.shape) if group else local
    return ((1.0 - beta) * sums[0] + beta * sums[1]).view(p.shape[:-1]), sums, saved


def _jsd_fake(p, q, *settings):
    dtype = accumulator_dtype(p, q)
    jsd = p.new_empty(p.shape[:-1], dtype=dtype)
    return jsd, p.new_empty((2, jsd.numel()), dtype=dtype), p.new_empty((4, jsd.numel()), dtype=dtype)


def _jsd_backward(p, q, sums, saved, g, beta, need_p, need_q, *settings):
    """Gradients of the two logits, contiguous, in their dtypes; size 0 where not needed."""
    options = pair_options(p, *settings)
    grads = empty_gradients(p, q, need_p, need_q)
    wanted = (grads[0] if need_p else None, grads[1] if need_q else None)
    g = g.contiguous().view(-1)
    if triton_usable(p, q):
        from .kernels import jsd

        jsd.jsd_backward(p, q, sums, saved, g, beta, options, *wanted)
    else:
        jsd_backward(p, q, sums, saved, g, beta, options, *wanted)
    return grads


def _setup_context(ctx, inputs, output):
    p, q, beta, inverse_rows, *rest = inputs
    _, sums, saved = output
    ctx.mark_non_differentiable(sums, saved)
    ctx.save_for_backward(p, q, sums, saved, inverse_rows)
    ctx.beta, ctx.settings = beta, rest


def _backward(ctx, g, _g_sums, _g_saved):
    p, q, sums, saved, inverse_rows = ctx.saved_tensors
    need_p, need_q = ctx.needs_input_grad[:2]
    grads = vocab_jsd_backward(p, q, sums, saved, g, ctx.beta, need_p, need_q, inverse_rows, *ctx.settings)
    wanted = [
        first_derivative(grad, p, q, g) if need else None for grad, need in zip(grads, (need_p, need_q), strict=True)
    ]
    return (*wanted, *([None] * 5))


vocab_jsd = register(
    f"vocab_jsd(Tensor p, Tensor q, float beta, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _jsd,
    _jsd_fake,
    _backward,
    _setup_context,
)
vocab_jsd_backward = register(
    "vocab_jsd_backward(Tensor p, Tensor q, Tensor sums, Tensor saved, Tensor g, float beta, bool need_p, bool need_q,"
    f" {SETTINGS}) -> (Tensor, Tensor)",
    _jsd_backward,
    lambda p, q, sums, saved, g, beta, need_p, need_q, *_: empty_gradients(p, q, need_p, need_q),
)
