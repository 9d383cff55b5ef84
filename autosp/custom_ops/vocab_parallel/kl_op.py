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
from .derivatives import first_derivative
from .divergence_plain import PairOptions, combine_kl_stats, kl_backward, local_kl_stats
from .groups import gather_packed, shard_bounds
from .registry import register
from .rows import accumulator_dtype

# scales: inverse temperature, softcap; bounds: start, end, total
SETTINGS = "Tensor? inverse_rows, float[] scales, SymInt[] bounds, str group"


def pair_options(p, inverse_rows, scales, bounds, group) -> PairOptions:
    """Options of a pair operator; without bounds all columns of a shard are valid."""
    _, valid = shard_bounds(p.shape[-1], *bounds, group)
    return PairOptions(inverse_rows, *scales, valid)


def pair_statistics(p, q, options: PairOptions, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``(KL(P || Q) [N], saved [4, N])`` over the group, on whichever path the tensors take."""
    if not triton_usable(p, q):
        return combine_kl_stats(gather_packed(local_kl_stats(p, q, options), group), options)
    from .kernels import kl as kernels

    if not group:
        return kernels.whole_kl_stats(p, q, options)
    return kernels.combine_kl_stats(gather_packed(kernels.local_kl_stats(p, q, options), group), options)


def empty_gradients(p: torch.Tensor, q: torch.Tensor, need_p: bool, need_q: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised contiguous gradients; of size 0 where none is wanted."""
    grads = [
        torch.empty(t.shape if need else (0,), dtype=t.dtype, device=t.device) for t, need in ((p, need_p), (q, need_q))
    ]
    return grads[0], grads[1]


def _kl(p, q, *settings):
    """Returns ``(KL(P || Q) [...], saved [4, N])``; ``p`` and ``q`` are ``[..., V_local]`` logits, N rows in all."""
    kl, saved = pair_statistics(p, q, pair_options(p, *settings), settings[-1])
    return kl.view(p.shape[:-1]), saved


def _kl_fake(p, q, *settings):
    dtype = accumulator_dtype(p, q)
    kl = p.new_empty(p.shape[:-1], dtype=dtype)
    return kl, p.new_empty((4, kl.numel()), dtype=dtype)


def _kl_backward(p, q, kl, saved, g, need_p, need_q, *settings):
    """Gradients of the two logits, contiguous, in their dtypes; size 0 where not needed."""
    options = pair_options(p, *settings)
    grads = empty_gradients(p, q, need_p, need_q)
    wanted = (grads[0] if need_p else None, grads[1] if need_q else None)
    kl, g = kl.view(-1), g.contiguous().view(-1)
    if triton_usable(p, q):
        from .kernels import kl as kernels

        kernels.kl_backward(p, q, kl, saved, g, options, *wanted)
    else:
        kl_backward(p, q, kl, saved, g, options, *wanted)
    return grads


def _setup_context(ctx, inputs, output):
    p, q, inverse_rows, *rest = inputs
    kl, saved = output
    ctx.mark_non_differentiable(saved)
    ctx.save_for_backward(p, q, kl, saved, inverse_rows)
    ctx.settings = rest


def _backward(ctx, g, _g_saved):
    p, q, kl, saved, inverse_rows = ctx.saved_tensors
    need_p, need_q = ctx.needs_input_grad[:2]
    grads = vocab_kl_backward(p, q, kl, saved, g, need_p, need_q, inverse_rows, *ctx.settings)
    wanted = [
        first_derivative(grad, p, q, g) if need else None for grad, need in zip(grads, (need_p, need_q), strict=True)
    ]
    return (*wanted, *([None] * 4))


vocab_kl = register(
    f"vocab_kl(Tensor p, Tensor q, {SETTINGS}) -> (Tensor, Tensor)", _kl, _kl_fake, _backward, _setup_context
)
vocab_kl_backward = register(
    "vocab_kl_backward(Tensor p, Tensor q, Tensor kl, Tensor saved, Tensor g, bool need_p, bool need_q,"
    f" {SETTINGS}) -> (Tensor, Tensor)",
    _kl_backward,
    lambda p, q, kl, saved, g, need_p, need_q, *_: empty_gradients(p, q, need_p, need_q),
)
