"""Losses of vocabulary-parallel logits as modules for hand-written loops, and as the loss of a model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..custom_ops._library import group_size
from ..custom_ops.collectives import all_gather_sequence
from ..custom_ops.linear_loss import vocab_parallel_linear_cross_entropy
from ..custom_ops.vocab_parallel import vocab_parallel_cross_entropy
from ..errors import InputError
from .deferred import DeferredLogits
from .linear import is_vocab_sharded, local_part
from .partition import VocabGroup

IGNORE_INDEX = -100
REDUCTIONS = ("mean", "sum", "none")
_LOGITS_EXIST = (
    "vocab_parallel_ce_backend is 'fused_linear', but the model computes with its logits before the loss, so that they "
    "exist: set it to 'torch', or compile the model"
)


class VocabParallelCrossEntropyLoss(nn.Module):
    """Cross entropy of logits that are sharded over the vocabulary, as ``torch.nn.CrossEntropyLoss`` of whole ones.

    Args:
        tp_group: group over which the vocabulary is sharded; None: the logits say it themselves (DTensors), or are
            whole.
        sp_group: group over which the tokens are sharded; "mean" and "sum" are then over all its tokens.
        ignore_index, reduction, label_smoothing: as in ``torch.nn.CrossEntropyLoss``; label smoothing is over the
            whole vocabulary.
        gather_losses: with reduction "none", give the losses of the whole sequence, gathered over ``sp_group`` along
            the last dimension; ranks hold equal numbers of tokens.

    Raises:
        InputError: an unknown reduction; ``gather_losses`` without ``sp_group`` or with another reduction.
    """

    def __init__(
        self,
        tp_group: Any = None,
        sp_group: Any = None,
        *,
        ignore_index: int = IGNORE_INDEX,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        gather_losses: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in REDUCTIONS:
            raise InputError(f"reduction is {reduction!r}; allowed: {', '.join(map(repr, REDUCTIONS))}")
        if gather_losses and sp_group is None:
            raise InputError(
                "gather_losses=True gathers the losses over a sequence group, but sp_group is None (which never means "
                "the world); give the group that shares the sequence"
            )
        if gather_losses and reduction != "none":
            raise InputError(
                f"gather_losses=True gathers one loss a token, but reduction is {reduction!r}; use 'none' (with "
                "sp_group, 'mean' and 'sum' are over the whole sequence already)"
            )
        self.tp = VocabGroup(tp_group)
        self.sp = VocabGroup(sp_group)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.gather_losses = gather_losses

    def forward(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        *,
        vocab_start_index: int | None = None,
        vocab_end_index: int | None = None,
    ) -> torch.Tensor:
        """Loss of ``logits`` ``[..., V]`` (a DTensor) or ``[..., V_local]`` against global ids ``target`` ``[...]``.

        Args:
            logits: what `VocabParallelLinear` gives, as DTensor or local columns.
            target: int64 or int32.
            vocab_start_index, vocab_end_index: of local columns that are not equal shards in rank order.

        Returns:
            fp32: a number, or ``[...]`` for "none".

        Raises:
            InputError: logits of another group, bounds given twice, or as `vocab_parallel_cross_entropy`.
        """
        logits, group, start, end = _local_logits(logits, self.tp, vocab_start_index, vocab_end_index)
        losses = vocab_parallel_cross_entropy(
            logits,
            target,
            group or None,
            self.sp.name or None,
            start,
            end,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
        )
        return _gather(losses, self.sp.name) if self.gather_losses else losses


class VocabParallelCausalLMLoss(nn.Module):
    """The causal-LM loss of transformers on logits that are sharded over the vocabulary.

    As ``transformers.loss.loss_utils.ForCausalLMLoss``: labels are shifted by one unless ``shift_labels`` is given, and
    with ``num_items_in_batch`` the sum of the losses is divided by it. ``label_smoothing`` is that of the Trainer's
    ``LabelSmoother``, which is the one of ``torch.nn.functional.cross_entropy``.

    Args:
        tp_group, sp_group, ignore_index, label_smoothing: as for `VocabParallelCrossEntropyLoss`. With ``sp_group``
            labels must be shifted beforehand, since the next token of a shard's last one is another rank's.
    """

    def __init__(
        self,
        tp_group: Any = None,
        sp_group: Any = None,
        *,
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        settings: dict[str, Any] = dict(ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.mean = VocabParallelCrossEntropyLoss(tp_group, sp_group, **settings)
        self.sum = VocabParallelCrossEntropyLoss(tp_group, sp_group, reduction="sum", **settings)

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        num_items_in_batch: int | torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        vocab_start_index: int | None = None,
        vocab_end_index: int | None = None,
    ) -> torch.Tensor:
        """Loss of ``logits`` ``[batch, tokens, V or V_local]`` against ``labels`` or ``shift_labels``
        ``[batch, tokens]``; a fp32 number.

        Raises:
            InputError: neither kind of labels, or unshifted ones with a sequence group.
        """
        if shift_labels is None and self.mean.sp.name:
            raise InputError(
                "labels of a sharded sequence cannot be shifted here: the next token of a shard's last one is another "
                "rank's. Shift the whole labels before they are cut, and give shift_labels"
            )
        target = shifted(labels, shift_labels, self.mean.ignore_index)
        bounds = dict(vocab_start_index=vocab_start_index, vocab_end_index=vocab_end_index)
        if num_items_in_batch is None:
            return self.mean(logits, target, **bounds)
        return divided(self.sum(logits, target, **bounds), num_items_in_batch)


class HeadLoss:
    """What takes the place of a model's ``loss_function``: the vocabulary-parallel loss where the logits are sharded.

    Whole logits (under the compiler, which does the same by itself, or gathered ones) go to the model's own loss.

    Args:
        original: the model's own loss function.
        shifts: whether it shifts the labels (causal) or not (masked); None: it is one that autosp does not know.
        fused: whether the logits are not to exist.
    """

    def __init__(self, original: Callable[..., torch.Tensor], shifts: bool | None, fused: bool = False) -> None:
        self.original, self.shifts, self.fused = original, shifts, fused

    def __call__(self, logits: Any, labels: Any = None, vocab_size: Any = None, *args: Any, **kwargs: Any) -> Any:
        deferred = isinstance(logits, DeferredLogits)
        if not deferred and not is_vocab_sharded(logits):
            return self.original(logits, labels, vocab_size, *args, **kwargs)
        if self.shifts is None or args:
            name = getattr(self.original, "__name__", type(self.original).__name__)
            raise InputError(
                f"the model's loss function {name} is not one that autosp knows on sharded logits (ForCausalLMLoss, "
                'ForMaskedLMLoss); compile the model with backend="autosp", which follows any loss, or set its lm_head '
                "to output='full'"
            )
        return self._sharded(logits, labels, **kwargs)

    def _sharded(
        self,
        logits: Any,
        labels: torch.Tensor,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: torch.Tensor | None = None,
        **_unused: Any,
    ) -> torch.Tensor:
        target = shifted(labels, shift_labels, ignore_index) if self.shifts else labels
        reduction = "mean" if num_items_in_batch is None else "sum"
        if isinstance(logits, DeferredLogits):
            loss = fused_loss(logits, target, ignore_index, reduction)
        elif self.fused:
            raise InputError(_LOGITS_EXIST)
        else:
            columns, group, start, end = local_part(logits)
            rows = columns.flatten(0, -2)  # a shard may have no columns
            target = target.reshape(-1).to(rows.device)
            loss = vocab_parallel_cross_entropy(rows, target, group.name, None, start, end, ignore_index, reduction)
        return divided(loss, num_items_in_batch)


def fused_loss(logits: DeferredLogits, target: torch.Tensor, ignore_index: int, reduction: str) -> torch.Tensor:
    """Cross entropy of logits that are not computed; ``target`` has as many ids as there are tokens.

    Raises:
        InputError: the model did something with the logits that needs them.
    """
    form = logits.fused_form()
    if form is None:
        raise InputError(_LOGITS_EXIST)
    head, (softcap, temperature) = logits.head, form
    hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    weight: torch.Tensor = head.weight
    bias: torch.Tensor | None = head.bias
    if hidden.dtype != weight.dtype:
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    return vocab_parallel_linear_cross_entropy(
        hidden,
        weight,
        target.reshape(-1).to(hidden.device),
        bias,
        head.tp_group,
        None,
        head.vocab_start_index,
        head.vocab_end_index,
        ignore_index,
        reduction,
        softcap=softcap,
        temperature=temperature,
    )


def shifted(labels: torch.Tensor | None, shift_labels: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """Labels of the next token, ``ignore_index`` at the end: ``shift_labels`` where it is given."""
    if shift_labels is not None:
        return shift_labels
    if labels is None:
        raise InputError("give labels, or shift_labels")
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def divided(loss: torch.Tensor, count: int | torch.Tensor | None) -> torch.Tensor:
    """A summed loss over ``num_items_in_batch``, as transformers divides."""
    if count is None:
        return loss
    return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)


def _local_logits(logits: Any, tp: VocabGroup, start: int | None, end: int | None) -> tuple:
    if not is_vocab_sharded(logits):
        return logits, tp.name, start, end
    if start is not None or end is not None:
        raise InputError("the logits are a DTensor, which says its own bounds; leave vocab_start_index and _end out")
    columns, group, start, end = local_part(logits)
    if tp.name and tp.name != group.name:
        raise InputError(f"the logits are sharded over group {group.name!r}, the loss was made for {tp.name!r}")
    return columns, group.name, start, end


def _gather(losses: torch.Tensor, group: str) -> torch.Tensor:
    dim = losses.dim() - 1
    length = losses.shape[dim] * group_size(group)
    return all_gather_sequence(losses.contiguous(), dim, length, length, 0, 1, 1, False, group)
