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

from typing import NamedTuple

import torch

from ...errors import InputError
from ..dispatch import triton_usable
from .derivatives import first_derivative
from .groups import gather_packed, shard_bounds
from .registry import register
from .row_stats_plain import (
    PACKED_FIELDS,
    RowGradients,
    RowOptions,
    combine_row_stats,
    local_row_stats,
    row_stats_backward,
)
from .rows import accumulator_dtype, count_rows

# scales: inverse temperature, softcap; bounds: start, end, total; flags: see Flags
_SETTINGS = "Tensor? inverse_rows, float[] scales, SymInt[] bounds, str group, int ignore_index, bool[] flags"


class Flags(NamedTuple):
    """What a call asks for; ``RowOptions`` says what each means. ``inplace`` is for the backward."""

    entropy: bool = False
    mean: bool = False
    exclude: bool = False
    skip_ignored: bool = False
    inplace: bool = False


def _options(logits, inverse_rows, scales, bounds, group, ignore_index, flags) -> RowOptions:
    first, valid = shard_bounds(logits.shape[-1], *bounds, group)
    return RowOptions(inverse_rows, *scales, first, valid, bounds[2], ignore_index, *flags[:4])


def _ids(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``index`` as ``[rows, K]``."""
    if index.dim() == logits.dim():
        return index.reshape(count_rows(logits), index.shape[-1])
    return index.reshape(-1, 1)


def _row_stats(logits, index, inverse_rows, scales, bounds, group, ignore_index, flags):
    """Returns ``(logp, lse, entropy, mean_logp, is_argmax, saved)``.

    Args:
        logits: ``[..., V_local]``, N rows in all.
        index: int64 ``[...]`` or ``[..., K]``, contiguous; the shape of ``logp`` and of ``is_argmax`` (bool).

    ``lse``, ``entropy`` and ``mean_logp`` have shape ``[...]``, the last two ``[0]`` where not asked for; ``saved`` is
    ``[2N + 1]``: m, log s and the size of the vocabulary.
    """
    ids = _ids(logits, index)
    try:
        options = _options(logits, inverse_rows, scales, bounds, group, ignore_index, flags)
    except InputError:
        # Only this rank's shard may be wrong: the others wait for its statistics, and get NaN.
        length = ids.shape[0] * (PACKED_FIELDS + ids.shape[1]) + 2
        gather_packed(logits.new_full((length,), torch.nan, dtype=accumulator_dtype(logits)), group)
        raise
    if triton_usable(logits, index):
        from .kernels import row_stats as kernels

        if group:
            packed = kernels.local_row_stats(logits, ids, options)
            results = kernels.combine_row_stats(gather_packed(packed, group), ids, options)
        else:
            results = kernels.whole_row_stats(logits, ids, options)
    else:
        packed = local_row_stats(logits, ids, options)
        results = combine_row_stats(gather_packed(packed, group), ids, options)
    lead = logits.shape[:-1]
    return (
        results.logp.view(index.shape),
        results.lse.view(lead),
        results.entropy.view(lead if options.entropy else 0),
        results.mean_logp.view(lead if options.mean else 0),
        results.is_argmax.view(index.shape),
        results.saved,
    )


def _row_stats_fake(logits, index, inverse_rows, scales, bounds, group, ignore_index, flags):
    lead, dtype = logits.shape[:-1], accumulator_dtype(logits)
    per_row = [logits.new_empty(lead if wanted else (0,), dtype=dtype) for wanted in (True, flags[0], flags[1])]
    logp = logits.new_empty(index.shape, dtype=dtype)
    is_argmax = logits.new_empty(index.shape, dtype=torch.bool)
    return logp, *per_row, is_argmax, logits.new_empty(2 * count_rows(logits) + 1, dtype=dtype)


def _write_gradient(out, logits, index, saved, entropy, gradients, *settings):
    options = _options(logits, *settings)
    upstream = RowGradients(*(None if g is None else g.contiguous().view(-1) for g in gradients))
    ids = _ids(logits, index)
    if triton_usable(logits, index):
        from .kernels import row_stats as kernels

        kernels.row_stats_backward(logits, ids, saved, entropy, upstream, options, out)
    else:
        row_stats_backward(logits, ids, saved, entropy.view(-1), upstream, options, out)


def _row_stats_backward(logits, index, saved, entropy, g_logp, g_lse, g_entropy, g_mean, *settings):
    """Gradient of the logits, contiguous, in their shape and dtype."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _write_gradient(out, logits, index, saved, entropy, (g_logp, g_lse, g_entropy, g_mean), *settings)
    return out


def _row_stats_backward_inplace(logits, index, saved, entropy, g_logp, g_lse, g_entropy, g_mean, *settings):
    """Write the gradient over the (contiguous) logits."""
    _write_gradient(logits, logits, index, saved, entropy, (g_logp, g_lse, g_entropy, g_mean), *settings)


def _setup_context(ctx, inputs, output):
    logits, index, inverse_rows, *rest = inputs
    _, _, entropy, _, is_argmax, saved = output
    ctx.mark_non_differentiable(is_argmax, saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, index, saved, entropy, inverse_rows)
    ctx.settings = rest


def _backward(ctx, g_logp, g_lse, g_entropy, g_mean, _g_argmax, _g_saved):
    logits, index, saved, entropy, inverse_rows = ctx.saved_tensors
    flags = Flags(*ctx.settings[-1])
    # Under AOTAutograd the outputs of size 0 have gradients too, of size 0.
    upstream = (g_logp, g_lse, g_entropy if flags.entropy else None, g_mean if flags.mean else None)
    arguments = (index, saved, entropy, *upstream, inverse_rows, *ctx.settings)
    if not ctx.needs_input_grad[0] or all(g is None for g in upstream):
        grad = None
    elif flags.inplace:
        vocab_row_stats_backward_(logits, *arguments)
        torch.autograd.graph.increment_version(logits)
        grad = logits.detach()
    else:
        grad = vocab_row_stats_backward(logits, *arguments)
    return (first_derivative(grad, logits, *upstream), *([None] * 7))


vocab_row_stats = register(
    f"vocab_row_stats(Tensor logits, Tensor index, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _row_stats,
    _row_stats_fake,
    _backward,
    _setup_context,
)
_GRADIENT_ARGUMENTS = (
    "Tensor index, Tensor saved, Tensor entropy, Tensor? g_logp, Tensor? g_lse, Tensor? g_entropy, Tensor? g_mean"
)
vocab_row_stats_backward = register(
    f"vocab_row_stats_backward(Tensor logits, {_GRADIENT_ARGUMENTS}, {_SETTINGS}) -> Tensor",
    _row_stats_backward,
    lambda logits, *_: logits.new_empty(logits.shape),
)
vocab_row_stats_backward_ = register(
    f"vocab_row_stats_backward_(Tensor(a!) logits, {_GRADIENT_ARGUMENTS}, {_SETTINGS}) -> ()",
    _row_stats_backward_inplace,
    lambda logits, *_: None,
)
