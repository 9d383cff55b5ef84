"""Cross entropy, log-probabilities, entropy and token statistics of logits that are sharded over the vocabulary, or
whole.

All of them read the logits once in the forward and once in the backward. Results are float32 (float64 for float64
logits), per row, the same on every rank of ``tp_group``; gradients have the logits' dtype and are contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import InputError
from .checks import (
    Bounds,
    Scaling,
    check_bounds,
    check_group,
    check_index,
    check_inplace,
    check_logits,
    check_options,
    check_scaling,
)
from .reduce_op import sum_over_group
from .row_stats_op import vocab_row_stats
from .strict import check_targets_strictly

DEFAULT_IGNORE_INDEX = -100


class TokenStats(NamedTuple):
    """What ``vocab_parallel_token_stats`` returns, each of the index's shape or of ``logits.shape[:-1]``.

    Attributes:
        logprob: log-probability of each id; differentiable.
        entropy: entropy of each row; differentiable.
        lse: log-sum-exp of each row's effective logits; differentiable.
        is_argmax: bool, whether the id has the row's largest logit (a tie counts as yes).
    """

    logprob: torch.Tensor
    entropy: torch.Tensor
    lse: torch.Tensor
    is_argmax: torch.Tensor


class RowStats(NamedTuple):
    """Results of one call of the operator; see ``row_stats_op``."""

    logp: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    mean_logp: torch.Tensor
    is_argmax: torch.Tensor


def run_row_stats(
    logits: torch.Tensor,
    index: torch.Tensor,
    group: str,
    bounds: Bounds,
    scaling: Scaling,
    ignore_index: int = DEFAULT_IGNORE_INDEX,
    *,
    entropy: bool = False,
    mean: bool = False,
    exclude: bool = False,
    skip_ignored: bool = False,
    inplace: bool = False,
) -> RowStats:
    """Call the operator with checked arguments."""
    *results, _saved = vocab_row_stats(
        logits,
        index,
        scaling.inverse_rows,
        (scaling.inverse, scaling.softcap),
        bounds,
        group,
        ignore_index,
        (entropy, mean, exclude, skip_ignored, inplace),
    )
    return RowStats(*results)


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: Any = None,
    sp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = DEFAULT_IGNORE_INDEX,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    *,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    strict: bool = False,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """Cross entropy, with label smoothing over the *global* vocabulary and an optional z-loss.

    Per token ``(1 - eps)(-log p_t) - eps mean_j log p_j + z_loss * L^2`` with ``L`` the log-sum-exp (label smoothing as
    ``torch.nn.functional.cross_entropy``; z-loss as PaLM, Chowdhery et al. 2022, section 5).

    Args:
        logits: ``[..., V_local]``; float32, bfloat16, float16 or float64; any leading strides (``logits[:, :-1]`` is
        not copied). target: int64 or int32 ``[...]``, global ids.
        tp_group: group over which the vocabulary is sharded: None (whole vocabulary here; never the world), a
        ProcessGroup
            or its name.
        sp_group: group over which the tokens are sharded; ``mean`` and ``sum`` are then over all its tokens, and each
        rank's
            gradient is that of the whole loss.
        vocab_start_index: first global id of this shard. Default: equal shards in rank order.
        vocab_end_index: one past the last id; columns after it are padding, which is ignored and gets gradient zero.
        ignore_index: tokens with this target count neither in the sum nor in the mean.
        reduction: "mean", "sum" or "none".
        label_smoothing: eps in [0, 1].
        z_loss: factor of the squared log-sum-exp.
        temperature: positive number, or a tensor of shape ``[...]``; logits are divided by it after the soft cap.
        softcap: c of ``c tanh(logits / c)``, or None.
        strict: look at the targets on the host (waits for the device; not under torch.compile) and raise for an id
            outside the vocabulary, on every rank of both groups, and for targets that differ over ``tp_group``.
        inplace_backward: write the gradient over the logits, a contiguous tensor that is no parameter (or view of
            one). Another use of them in the backward is then an autograd
        error.

    Returns:
        float32 scalar, or ``[...]`` for "none". Without ``strict``, an id in nobody's shard gives NaN. All targets
        ignored: NaN for "mean", as in PyTorch.

    Raises:
        InputError: a wrong shape, dtype, device, group, bound or option.
    """
    check_logits(logits)
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}.")
    check_options(ignore_index, label_smoothing, z_loss)
    index = check_index(logits, target, "target", trailing=False)
    tp_name, sp_name = check_group(tp_group), check_group(sp_group, "sp_group")
    bounds = check_bounds(logits, tp_name, vocab_start_index, vocab_end_index)
    scaling = check_scaling(logits, temperature, softcap)
    if inplace_backward:
        check_inplace(logits)
    if strict:
        check_targets_strictly(logits, index, ignore_index, bounds, "target", tp_name, sp_name)
    stats = run_row_stats(
        logits,
        index,
        tp_name,
        bounds,
        scaling,
        ignore_index,
        mean=label_smoothing > 0,
        skip_ignored=True,
        inplace=inplace_backward,
    )
    loss = -stats.logp
    if label_smoothing > 0:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * stats.mean_logp
    if z_loss:
        loss = loss + z_loss * stats.lse.square()
    if reduction == "none":
        return loss
    summed = sum_over_group(loss.sum(), sp_name)
    if reduction == "sum":
        return summed
    return summed / sum_over_group((index != ignore_index).sum().to(loss.dtype), sp_name)


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    index: torch.Tensor,
    tp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = DEFAULT_IGNORE_INDEX,
    *,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    strict: bool = False,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """Log-probabilities ``log softmax(logits)[index]``.

    Args:
        logits: ``[..., V_local]``.
        index: int64 or int32 ``[...]`` or ``[..., K]``, global ids; repeated ids are fine.
        tp_group, vocab_start_index, vocab_end_index, temperature, softcap, strict, inplace_backward: as in
            ``vocab_parallel_cross_entropy``.
        global_vocab_size: size of the vocabulary; without bounds, the shards are then ``torch.chunk``'s, uneven or
        empty
            ones included, and columns beyond a shard's ids are padding.
        ignore_index: entries with this id give 0.0 and no gradient.

    Returns:
        float32 of the index's shape; NaN for an id in nobody's shard.

    Raises:
        InputError: a wrong shape, dtype, device, group, bound or option.
    """
    check_logits(logits)
    check_options(ignore_index)
    ids = check_index(logits, index, "index")
    name = check_group(tp_group)
    bounds = check_bounds(logits, name, vocab_start_index, vocab_end_index, global_vocab_size)
    scaling = check_scaling(logits, temperature, softcap)
    if inplace_backward:
        check_inplace(logits)
    if strict:
        check_targets_strictly(logits, ids, ignore_index, bounds, "index", name)
    skip = ids.dim() < logits.dim()
    stats = run_row_stats(logits, ids, name, bounds, scaling, ignore_index, skip_ignored=skip, inplace=inplace_backward)
    return stats.logp


def vocab_parallel_entropy(
    logits: torch.Tensor,
    tp_group: Any = None,
    *,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """Entropy ``-sum_j p_j log p_j`` of every row, in nats; terms with ``p_j = 0`` are skipped.

    Args:
        logits: ``[..., V_local]``; shards may be uneven or empty without bounds.
        tp_group, vocab_start_index, vocab_end_index, temperature, softcap, inplace_backward: as in
            ``vocab_parallel_cross_entropy``; bounds are only needed to name padding columns.

    Returns:
        float32 ``[...]``; NaN for a row that is -inf throughout.

    Raises:
        InputError: a wrong shape, dtype, group, bound or option.
    """
    check_logits(logits)
    name = check_group(tp_group)
    bounds = check_bounds(logits, name, vocab_start_index, vocab_end_index)
    scaling = check_scaling(logits, temperature, softcap)
    if inplace_backward:
        check_inplace(logits)
    no_ids = torch.empty((*logits.shape[:-1], 0), dtype=torch.int64, device=logits.device)
    stats = run_row_stats(logits, no_ids, name, bounds, scaling, entropy=True, inplace=inplace_backward)
    return stats.entropy


def vocab_parallel_token_stats(
    logits: torch.Tensor,
    index: torch.Tensor,
    tp_group: Any = None,
    *,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = DEFAULT_IGNORE_INDEX,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    strict: bool = False,
    inplace_backward: bool = False,
) -> TokenStats:
    """Log-probability, entropy, log-sum-exp and greedy match from one read of the logits.

    Args:
        logits: ``[..., V_local]``.
        index: int64 or int32 ``[...]`` or ``[..., K]``.
        others: as in ``vocab_parallel_logprobs``. An ignored entry has log-probability 0 and is no argmax; its row
        still has
            an entropy and a log-sum-exp.

    Returns:
        ``TokenStats(logprob, entropy, lse, is_argmax)``.

    Raises:
        InputError: a wrong shape, dtype, device, group, bound or option.
    """
    check_logits(logits)
    check_options(ignore_index)
    ids = check_index(logits, index, "index")
    name = check_group(tp_group)
    bounds = check_bounds(logits, name, vocab_start_index, vocab_end_index, global_vocab_size)
    scaling = check_scaling(logits, temperature, softcap)
    if inplace_backward:
        check_inplace(logits)
    if strict:
        check_targets_strictly(logits, ids, ignore_index, bounds, "index", name)
    stats = run_row_stats(logits, ids, name, bounds, scaling, ignore_index, entropy=True, inplace=inplace_backward)
    return TokenStats(stats.logp, stats.entropy, stats.lse, stats.is_argmax)
