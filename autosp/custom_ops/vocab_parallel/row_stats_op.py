"""``autosp::vocab_row_stats``: every one-tensor loss from one read of the logits, and its gradient in one read and
write.

Outputs per row, with ``z = k u`` the effective logits (see ``row_stats_plain`` for the notation) and ``p =
softmax(z)`` over the whole vocabulary:

    logp_i    = z_i - L                 for every id i given          L = logsumexp(z)
    lse       = L
    entropy   = -sum_j p_j log p_j = L - sum_j p_j z_j
    mean_logp = (1/V) sum_j log p_j

Gradient. ``dL/dz_j = p_j`` gives each by the chain rule: ``dlogp_i/dz_j = [i=j] - p_j``; ``dlse/dz_j = p_j``;
``dmean_logp/dz_j = 1/V - p_j``; and for the entropy ``H = L - sum p z`` with ``dp_i/dz_j = p_i([i=j] - p_j)``:
``dH/dz_j = p_j - p_j - p_j(z_j - sum p z) = -p_j (log p_j + H)`` (the entropy bonus of policy gradients, e.g. Mnih et
al. 2016, section 4). With upstream gradients ``g`` all of them are one form,

    dz_j = p_j (A + B log p_j) + C + sum_i D_i [i = j],   dx_j = dz_j * k * (1 - tanh(x_j / c)^2)
    A = g_lse - sum_i g_logp_i - g_entropy H - g_mean,  B = -g_entropy,  C = g_mean / V,  D_i = g_logp_i

which needs only the row's own ``m`` and ``log s``: no collective in the backward. A row whose upstream gradients are
all zero gets zeros without being read.

With ``exclude`` the columns named by the ids are left out of the statistics (the tail of a top-k distribution):
``lse`` is then ``T - M`` and ``logp_i`` is ``z_i - M``, with T the log-sum-exp of the tail and M the row's maximum,
which is treated as a constant: what is made of them must not depend on a common offset.
"""

from __future__ import annotations

import torch

from ...errors import UnsupportedGraphError
from ..dispatch import triton_usable
from .groups import gather_packed, shard_bounds
from .row_stats_plain import (
    RowGradients,
    RowOptions,
    RowResults,
    combine_row_stats,
    local_row_stats,
    row_stats_backward,
)
from .rows import accumulator_dtype, count_rows

_OPTIONS = (
    "Tensor? inverse_rows, float inverse, float softcap, int start, int end, int total, str group, int ignore_index,"
    " bool entropy, bool mean, bool exclude, bool skip_ignored"
)
_BACKWARD = (
    "Tensor index, Tensor saved, Tensor entropy_value, Tensor? g_logp, Tensor? g_lse, Tensor? g_entropy, Tensor? g_mean"
)


@torch.library.custom_op(
    "autosp::vocab_row_stats",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor index, {_OPTIONS}, bool inplace)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def vocab_row_stats(
    logits,
    index,
    inverse_rows,
    inverse,
    softcap,
    start,
    end,
    total,
    group,
    ignore_index,
    entropy,
    mean,
    exclude,
    skip_ignored,
    inplace,
):
    """Returns ``(logp [N, K], lse [N], entropy [N] or [0], mean_logp [N] or [0], is_argmax bool [N, K], saved [2N +
    1])``.

    Args:
        logits: ``[..., V_local]``, N rows in all.
        index: int64 ``[N, K]``.
    """
    first, valid = shard_bounds(logits.shape[-1], start, end, total, group)
    options = RowOptions(
        inverse_rows, inverse, softcap, first, valid, total, ignore_index, entropy, mean, exclude, skip_ignored
    )
    if triton_usable(logits, index):
        from .kernels import row_stats as kernels

        packed = kernels.local_row_stats(logits, index, options)
        results = kernels.combine_row_stats(gather_packed(packed, group), index, options)
    else:
        packed = local_row_stats(logits, index, options)
        results = combine_row_stats(gather_packed(packed, group), index, options)
    return _as_tuple(results)


def _as_tuple(results: RowResults):
    return (
        results.logp,
        results.lse,
        results.entropy,
        results.mean_logp,
        results.is_argmax,
        results.saved,
    )


@vocab_row_stats.register_fake
def _(
    logits,
    index,
    inverse_rows,
    inverse,
    softcap,
    start,
    end,
    total,
    group,
    ignore,
    entropy,
    mean,
    exclude,
    skip,
    inplace,
):
    rows, dtype = count_rows(logits), accumulator_dtype(logits)
    per_row = [logits.new_empty(rows if wanted else 0, dtype=dtype) for wanted in (True, entropy, mean)]
    logp = logits.new_empty(index.shape, dtype=dtype)
    is_argmax = logits.new_empty(index.shape, dtype=torch.bool)
    return logp, *per_row, is_argmax, logits.new_empty(2 * rows + 1, dtype=dtype)


def _run_backward(out, logits, index, saved, entropy_value, gradients, inverse_rows, inverse, softcap, bounds, flags):
    start, end, total, group = bounds
    ignore_index, exclude, skip_ignored = flags
    first, valid = shard_bounds(logits.shape[-1], start, end, total, group)
    options = RowOptions(
        inverse_rows, inverse, softcap, first, valid, total, ignore_index, exclude=exclude, skip_ignored=skip_ignored
    )
    upstream = RowGradients(*(None if g is None else g.contiguous() for g in gradients))
    if triton_usable(logits, index):
        from .kernels import row_stats as kernels

        kernels.row_stats_backward(logits, index, saved, entropy_value, upstream, options, out)
    else:
        row_stats_backward(logits, index, saved, entropy_value, upstream, options, out)


@torch.library.custom_op(
    "autosp::vocab_row_stats_backward", mutates_args=(), schema=f"(Tensor logits, {_BACKWARD}, {_OPTIONS}) -> Tensor"
)
def vocab_row_stats_backward(
    logits,
    index,
    saved,
    entropy_value,
    g_logp,
    g_lse,
    g_entropy,
    g_mean,
    inverse_rows,
    inverse,
    softcap,
    start,
    end,
    total,
    group,
    ignore_index,
    entropy,
    mean,
    exclude,
    skip_ignored,
):
    """Gradient of the logits, contiguous, in their shape and dtype."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    gradients = (g_logp, g_lse, g_entropy, g_mean)
    bounds, flags = (start, end, total, group), (ignore_index, exclude, skip_ignored)
    _run_backward(out, logits, index, saved, entropy_value, gradients, inverse_rows, inverse, softcap, bounds, flags)
    return out


@vocab_row_stats_backward.register_fake
def _(logits, *rest):
    return logits.new_empty(logits.shape)


@torch.library.custom_op(
    "autosp::vocab_row_stats_backward_",
    mutates_args=("logits",),
    schema=f"(Tensor(a!) logits, {_BACKWARD}, {_OPTIONS}) -> ()",
)
def vocab_row_stats_backward_(
    logits,
    index,
    saved,
    entropy_value,
    g_logp,
    g_lse,
    g_entropy,
    g_mean,
    inverse_rows,
    inverse,
    softcap,
    start,
    end,
    total,
    group,
    ignore_index,
    entropy,
    mean,
    exclude,
    skip_ignored,
):
    """Write the gradient over the (contiguous) logits."""
    gradients = (g_logp, g_lse, g_entropy, g_mean)
    bounds, flags = (start, end, total, group), (ignore_index, exclude, skip_ignored)
    _run_backward(logits, logits, index, saved, entropy_value, gradients, inverse_rows, inverse, softcap, bounds, flags)


@vocab_row_stats_backward_.register_fake
def _(logits, *rest):
    return None


def _setup_context(ctx, inputs, output):
    logits, index, inverse_rows, inverse, softcap, *rest, inplace = inputs
    _, _, entropy_value, _, is_argmax, saved = output
    ctx.mark_non_differentiable(is_argmax, saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, index, saved, entropy_value, inverse_rows)
    ctx.scalars = (inverse, softcap, *rest)
    ctx.inplace = inplace


def _backward(ctx, g_logp, g_lse, g_entropy, g_mean, _g_argmax, _g_saved):
    logits, index, saved, entropy_value, inverse_rows = ctx.saved_tensors
    arguments = (index, saved, entropy_value, g_logp, g_lse, g_entropy, g_mean, inverse_rows, *ctx.scalars)
    if not ctx.needs_input_grad[0] or all(g is None for g in (g_logp, g_lse, g_entropy, g_mean)):
        grad = None
    elif ctx.inplace:
        if torch.is_grad_enabled():
            refuse_double_backward()
        vocab_row_stats_backward_(logits, *arguments)
        grad = logits.detach()
    else:
        grad = vocab_row_stats_backward(logits, *arguments)
    return (grad, *([None] * 14))


vocab_row_stats.register_autograd(_backward, setup_context=_setup_context)


def refuse_double_backward(*_):
    """The derivative of a gradient operator: always an error.

    Raises:
        UnsupportedGraphError: always.
    """
    raise UnsupportedGraphError(
        "the gradient of a vocabulary-parallel loss cannot be differentiated again",
        operator="autosp vocabulary-parallel backward",
        remedy="use the plain PyTorch formula for second derivatives, or detach the first gradient.",
    )


vocab_row_stats_backward.register_autograd(refuse_double_backward, setup_context=lambda ctx, inputs, output: None)
