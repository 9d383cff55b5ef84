"""Losses of logits on the vocabulary axis, and autosp's own operators over a vocabulary on both axes."""

from __future__ import annotations

import torch

from ..call import OpCall, Refusal, Strategy, Value
from ..placement import REPLICATE, Placement, Shard
from ..registry import register_rule
from .loss import MEAN, NONE
from .vocabulary import (
    Columns,
    _whole,
    on_vocabulary,
    own_columns,
    read_ids,
    row_stats,
    vocabulary_last,
)

aten = torch.ops.aten


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _is_over_classes(value: Value) -> bool:
    return value.shard is not None and value.shard.dim == (0 if value.ndim == 1 else 1)


@on_vocabulary(aten.cross_entropy_loss.default)
def cross_entropy_rule(call: OpCall) -> Strategy | None:
    """Cross entropy from the statistics of each shard, whole on every rank."""
    logits, target = call["self"], call["target"]
    if not _is_over_classes(logits):
        return None
    if target.dtype.is_floating_point:
        return _soft_strategy(call, logits)
    columns, shard = own_columns(call.axis, logits.shard), logits.shard
    smoothing = call["label_smoothing"]
    if smoothing and call["weight"] is not None:
        raise Refusal("class weights together with label smoothing, over a sharded vocabulary")

    def local_loss(c: OpCall, local: dict):
        ignore, labels = c["ignore_index"], local["target"]
        z = vocabulary_last(local["self"], shard, columns)
        stats = row_stats(c.axis, z, labels, columns, ignore_index=ignore, mean=smoothing > 0, skip_ignored=True)
        losses = -stats[0]
        if smoothing > 0:
            losses = (1.0 - smoothing) * losses - smoothing * stats[3]
        return reduced(losses, labels, local["weight"], ignore, c["reduction"], c.out.dtype)

    return _whole(shard, local_loss)


def reduced(losses, labels, weight, ignore: int, reduction: int, dtype: torch.dtype) -> torch.Tensor:
    """Losses of each row (zero where ignored), by ``reduction``, with class weights; of ``dtype``."""
    counts = labels != ignore
    if weight is not None:
        chosen = weight.detach().to(losses.dtype)[torch.where(counts, labels, 0)]
        counts = torch.where(counts, chosen, torch.zeros_like(chosen))
        losses = losses * counts
    if reduction == NONE:
        return losses.to(dtype)
    total = losses.sum()
    return (total / counts.sum().to(total.dtype) if reduction == MEAN else total).to(dtype)


def _soft_strategy(call: OpCall, logits: Value) -> Strategy:
    """Targets that are probabilities: each rank's part of ``-sum_j w_j t_j log p_j``, summed."""
    shard = logits.shard
    columns, size = own_columns(call.axis, shard), logits.shape[shard.dim]
    if logits.ndim == 1:
        raise Refusal("cross entropy of a single token against probabilities, over a sharded vocabulary")
    inputs: dict[str, Placement] = {"self": shard, "target": shard}
    if call["weight"] is not None:
        inputs["weight"] = shard.at(0)

    def local_loss(c: OpCall, local: dict):
        wide = _wide(c.out.dtype)
        z = vocabulary_last(local["self"], shard, columns)
        logp = torch.ops.autosp.vocab_softmax(z, True, wide, c.axis.group)
        target = vocabulary_last(local["target"], shard, columns).to(wide)
        smoothing = c["label_smoothing"]
        if smoothing > 0:
            target = target * (1.0 - smoothing) + smoothing / size
        if local["weight"] is not None:
            target = target * vocabulary_last(local["weight"], shard.at(0), columns).to(wide)
        losses = torch.ops.autosp.all_reduce_sum(-(target * logp).sum(-1), c.axis.group)
        if c["reduction"] == NONE:
            return losses.to(c.out.dtype)
        total = losses.sum()
        return (total / losses.numel() if c["reduction"] == MEAN else total).to(c.out.dtype)

    return Strategy(inputs=inputs, output=REPLICATE, local=local_loss, sharded=False, note="loss over the vocabulary")


@on_vocabulary(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
def nll_rule(call: OpCall) -> Strategy | None:
    """Log-probabilities read by id: each is one rank's."""
    logp: Value = call["self"]
    if not _is_over_classes(logp):
        return None
    columns, shard = own_columns(call.axis, logp.shard), logp.shard

    def local_loss(c: OpCall, local: dict):
        labels, ignore = local["target"], c["ignore_index"]
        counts = labels != ignore
        ids = torch.where(counts, labels, 0).unsqueeze(shard.dim)
        mine = read_ids(c.axis, local["self"], ids, shard, columns).squeeze(shard.dim)
        losses = -torch.ops.autosp.all_reduce_sum(mine, c.axis.group)
        losses = torch.where(counts, losses, torch.zeros_like(losses)).to(_wide(losses.dtype))
        return reduced(losses, labels, local["weight"], ignore, c["reduction"], c.out.dtype)

    return _whole(shard, local_loss)


def _rows(value: Value, other: Value) -> Placement:
    """The layout of what has one number a row of ``value``, or some."""
    shard: Shard = value.shard
    if other.ndim <= shard.dim:
        return REPLICATE
    return shard


def row_stats_rule(call: OpCall) -> Strategy:
    """``autosp::vocab_row_stats`` of whole logits: over a cut vocabulary, or on this rank's tokens."""
    logits, index = call["logits"], call["index"]
    shard = logits.shard
    if call["group"] and shard is not None and shard.dim == logits.ndim - 1:
        raise Refusal("a loss over a group of its own, on logits that are sharded already", "leave tp_group out")
    if shard is None:
        return Strategy(output=[REPLICATE] * len(call.out))
    if shard.dim == logits.ndim - 1:
        return _stats_over_vocabulary(call, shard)
    if call["inverse_rows"] is not None:
        raise Refusal("a temperature of its own for each token", "divide the logits by it beforehand")
    entropy, mean = call["flags"][0], call["flags"][1]
    output = [shard, shard, shard if entropy else REPLICATE, shard if mean else REPLICATE, shard, None]
    return Strategy(inputs={"logits": shard, "index": _rows(logits, index)}, output=output)


def _stats_over_vocabulary(call: OpCall, shard: Shard) -> Strategy:
    columns = own_columns(call.axis, shard)

    def local_stats(c: OpCall, local: dict):
        z = vocabulary_last(local["logits"], shard, columns)
        return c.run(local, logits=z, bounds=columns.bounds, group=c.axis.group)

    return Strategy(
        inputs={"logits": shard},
        output=[REPLICATE] * len(call.out),
        local=local_stats,
        sharded=False,
        note="statistics over the vocabulary",
    )


def pair_rule(call: OpCall) -> Strategy:
    """``autosp::vocab_kl`` and ``vocab_jsd`` of whole logits: over a cut vocabulary, or on this rank's tokens."""
    names = ("p", "q")
    first: Value = call["p"]
    shard = next((call[name].shard for name in names if call[name].shard is not None), None)
    if shard is None:
        return Strategy(output=[REPLICATE] * len(call.out))
    inputs = dict.fromkeys(names, shard)
    if shard.dim != first.ndim - 1:
        if call["inverse_rows"] is not None:
            raise Refusal("a temperature of its own for each token", "divide the logits by it beforehand")
        return Strategy(inputs=inputs, output=[shard, *[None] * (len(call.out) - 1)])
    if call["group"]:
        raise Refusal("a loss over a group of its own, on logits that are sharded already", "leave tp_group out")
    columns: Columns = own_columns(call.axis, shard)

    def local_pair(c: OpCall, local: dict):
        sides = {name: vocabulary_last(local[name], shard, columns) for name in names}
        return c.run(local, **sides, bounds=columns.bounds, group=c.axis.group)

    return Strategy(
        inputs=inputs,
        output=[REPLICATE] * len(call.out),
        local=local_pair,
        sharded=False,
        note="divergence over the vocabulary",
    )


def register_vocabulary_rules() -> None:
    """Join the vocabulary operators to the rules, once they are registered with torch."""
    ops = torch.ops.autosp
    register_rule(ops.vocab_row_stats.default)(row_stats_rule)
    register_rule(ops.vocab_kl.default, ops.vocab_jsd.default)(pair_rule)
