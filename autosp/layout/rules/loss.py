"""Losses: each rank sums its own tokens in fp32 and one all-reduce gives every rank the loss of the whole sequence."""

from __future__ import annotations

import torch

from ..axis import Axis
from ..call import OpCall, Refusal, Strategy, Value
from ..placement import PARTIAL, REPLICATE, Shard
from ..registry import register_rule
from .pointwise import align, find_cut
from .reduction import mask_padding

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _class_weights(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """What each target counts in a mean: its class weight, zero when ignored."""
    valid = target != ignore_index
    if weight is None:
        return valid.to(dtype)
    chosen = weight.detach().to(dtype)[torch.where(valid, target, 0)]
    return torch.where(valid, chosen, torch.zeros_like(chosen))


def _target_cut(logits: Value, shard: Shard) -> Shard:
    """The cut of class-index targets: the class dimension is missing."""
    if logits.ndim == 1 or shard.dim == 1:
        raise Refusal("the loss is sharded over its classes")
    return shard if shard.dim == 0 else shard.at(shard.dim - 1)


@register_rule(
    aten.cross_entropy_loss.default,
    aten.nll_loss_nd.default,
    aten.nll_loss.default,
    aten.nll_loss2d.default,
    seeds=False,
)
def cross_entropy_rule(call: OpCall) -> Strategy:
    """Cross entropy of cut logits against whole or cut targets; padding rows count as ignored."""
    logits, target = call["self"], call["target"]
    is_soft = target.dtype.is_floating_point
    cut = logits.shard
    if cut is None and target.shard is not None:
        cut = target.shard if is_soft or target.shard.dim == 0 else target.shard.at(target.shard.dim + 1)
    if cut is None:
        return Strategy()
    target_cut = cut if is_soft else _target_cut(logits, cut)
    if is_soft and cut.dim == 1 and logits.ndim > 1:
        raise Refusal("the loss is sharded over its classes")
    reduction, ignore = call["reduction"], call.get("ignore_index", -100)
    inputs = {"self": cut, "target": target_cut}
    row_cut = _target_cut(logits, cut)
    out_dtype = call.out.dtype
    wide = _wide(out_dtype)

    def local_loss(c: OpCall, local: dict):
        axis: Axis = c.axis
        labels = local["target"]
        if not is_soft:
            labels = mask_padding(axis, labels, target_cut, ignore)
        losses = mask_padding(axis, c.run(local, target=labels, reduction=NONE), row_cut, 0)
        if reduction == NONE:
            return losses
        total = losses.to(wide).sum()
        count = None
        if reduction == MEAN:
            counts = (
                torch.ones_like(losses, dtype=wide)
                if is_soft
                else _class_weights(labels, local["weight"], ignore, wide)
            )
            count = mask_padding(axis, counts, row_cut, 0).sum()
        return torch.ops.autosp.aggregate_loss(total, count, out_dtype, axis.group)

    return Strategy(
        inputs=inputs,
        output=row_cut if reduction == NONE else REPLICATE,
        local=local_loss,
        fills={} if is_soft else {"target": ignore},
        note="loss aggregated over the sequence",
    )


@register_rule(
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default, aten.binary_cross_entropy.default, aten.kl_div.default,
    aten.soft_margin_loss.default, aten.poisson_nll_loss.default,
)  # fmt: skip
def elementwise_loss_rule(call: OpCall) -> Strategy:
    """Losses that compare element with element: summed over the valid rows, then over the group."""
    values = [value for _, value in call.values()]
    shape = torch.broadcast_shapes(*[value.shape for value in values])
    cut = find_cut(values, shape)
    if cut is None:
        return Strategy()
    inputs = {name: align(value, shape, cut) for name, value in call.values()}
    reduction = call["reduction"]
    if reduction == NONE:
        return Strategy(inputs=inputs, output=cut)
    count = 1
    for size in shape:
        count = count * size

    def local_loss(c: OpCall, local: dict):
        losses = mask_padding(c.axis, c.run(local, reduction=NONE), cut, 0)
        total = losses.to(_wide(losses.dtype)).sum()
        return total / count if reduction == MEAN else total

    return Strategy(inputs=inputs, output=PARTIAL, local=local_loss, note="loss summed over the sequence")


def fused_linear_rule(call: OpCall) -> Strategy:
    """``autosp::linear_cross_entropy_loss``: each rank's tokens with the whole head, aggregated like the plain loss."""
    hidden: Value = call["hidden"]
    cut = hidden.shard
    if cut is None:
        return Strategy()
    if cut.dim != 0:
        raise Refusal("a fused loss whose hidden states are sharded over their width")
    ignore, out_dtype = call["ignore_index"], call.out.dtype

    def local_loss(c: OpCall, local: dict):
        labels = mask_padding(c.axis, local["target"], cut, ignore)
        total, count = torch.ops.autosp.linear_cross_entropy_sums(
            local["hidden"], local["weight"], local["bias"], labels, ignore, c["label_smoothing"], c["softcap"],
            memory=c.get("memory", "auto"), size=c.get("size", 0), group=c.get("group", ""),
        )  # fmt: skip
        mean = c["reduction"] == MEAN
        return torch.ops.autosp.aggregate_loss(total, count if mean else None, out_dtype, c.axis.group)

    return Strategy(
        inputs={"hidden": cut, "target": cut},
        output=REPLICATE,
        local=local_loss,
        fills={"target": ignore},
        note="LM head fused into its loss, aggregated over the sequence",
        sharded=True,
    )


def register_fused_rules() -> None:
    """Join the fused operators to the rules, once they are registered with torch."""
    register_rule(torch.ops.autosp.linear_cross_entropy_loss.default, seeds=True)(fused_linear_rule)
