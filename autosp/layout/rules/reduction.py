"""Reductions and operators that work along one dimension (softmax, norms, sorts).

Along a dimension that is not cut they are local. Sums and means over the sequence become partial sums; maxima, minima
and logical reductions are combined from one value a rank; everything else along the sequence is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..call import OpCall, Refusal, Strategy, Value
from ..placement import PARTIAL, REPLICATE, IntLike, Shard, known_equal, product
from ..registry import register_rule

aten = torch.ops.aten


def reduced_dims(call: OpCall, value: Value) -> list[int]:
    """Dimensions that the call reduces, counted from the front; all of them when it names none."""
    dims = call.get("dim", call.get("dims"))
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(value.ndim))
    if isinstance(dims, int):
        dims = [dims]
    return [d % value.ndim for d in dims]


def without(shard: Shard, dims: Sequence[int], keepdim: bool) -> Shard:
    """The cut after other dimensions are reduced away."""
    return shard if keepdim else shard.at(shard.dim - sum(d < shard.dim for d in dims))


def mask_padding(axis, x: torch.Tensor, shard: Shard, neutral: float | int | bool) -> torch.Tensor:
    """``x`` with its padding rows replaced, so that a reduction over them adds nothing."""
    if not axis.has_padding(shard):
        return x
    return torch.where(
        axis.valid_rows(shard, x.dim(), x.device), x, torch.full((), neutral, dtype=x.dtype, device=x.device)
    )


@register_rule(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def sum_rule(call: OpCall) -> Strategy:
    """Over the sequence: each rank's sum of its valid rows, a partial sum; the mean divides by the whole count."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None:
        return Strategy()
    dims = reduced_dims(call, value)
    if shard.dim not in dims:
        return Strategy(inputs={"self": shard}, output=without(shard, dims, call.get("keepdim", False)))
    is_mean = call.target in (aten.mean.default, aten.mean.dim)
    count: IntLike = product([value.shape[d] for d in dims])
    dtype = call.out.dtype

    def partial_sum(c: OpCall, local: dict):
        x = mask_padding(c.axis, local["self"], shard, 0)
        # Half-precision sums are held in fp32 until the group has added them up, as one process would.
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        total = torch.sum(x, dims, keepdim=call.get("keepdim", False), dtype=wide)
        return total / count if is_mean else total

    return Strategy(inputs={"self": shard}, output=PARTIAL, local=partial_sum, note="sum over the sequence")


_EXTREMA = {
    aten.amax.default: ("amax", "lowest"),
    aten.amin.default: ("amin", "highest"),
    aten.max.default: ("amax", "lowest"),
    aten.min.default: ("amin", "highest"),
    aten.any.default: ("any", False),
    aten.any.dim: ("any", False),
    aten.any.dims: ("any", False),
    aten.all.default: ("all", True),
    aten.all.dim: ("all", True),
    aten.all.dims: ("all", True),
}


def _neutral(kind, dtype: torch.dtype):
    if isinstance(kind, bool) or dtype == torch.bool:
        return kind if isinstance(kind, bool) else kind == "highest"
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if dtype.is_floating_point:
        return float("-inf") if kind == "lowest" else float("inf")
    return limits.min if kind == "lowest" else limits.max


def _reduce(name: str, x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    if name in ("amax", "amin"):
        return getattr(torch, name)(x, dims, keepdim=keepdim)
    for dim in sorted(dims, reverse=True):
        x = getattr(torch, name)(x, dim=dim, keepdim=keepdim)
    return x


@register_rule(*_EXTREMA)
def extremum_rule(call: OpCall) -> Strategy:
    """Over the sequence: one value a rank, gathered and reduced again, whole on every rank."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None:
        return Strategy()
    dims = reduced_dims(call, value)
    keepdim = call.get("keepdim", False)
    if shard.dim not in dims:
        return Strategy(inputs={"self": shard}, output=without(shard, dims, keepdim))
    name, kind = _EXTREMA[call.target]

    def combine(c: OpCall, local: dict):
        axis, x = c.axis, local["self"]
        mine = _reduce(name, mask_padding(axis, x, shard, _neutral(kind, value.dtype)), dims, True).unsqueeze(0)
        is_bool = mine.dtype == torch.bool
        mine = mine.detach().to(torch.uint8) if is_bool else mine.detach()
        every = torch.ops.autosp.all_gather_sequence(mine, 0, axis.size, axis.size, 0, 1, 1, False, axis.group)
        extremum = _reduce(name, every.to(torch.bool) if is_bool else every, [0], False)
        if x.dtype.is_floating_point:
            extremum = _shared_by_ties(axis, x, extremum, shard, dims)
        return extremum if keepdim else extremum.squeeze(tuple(dims))

    return Strategy(
        inputs={"self": shard}, output=REPLICATE, local=combine, note="extremum over the sequence", sharded=True
    )


def _shared_by_ties(axis, x: torch.Tensor, extremum: torch.Tensor, shard: Shard, dims: Sequence[int]) -> torch.Tensor:
    """The extremum as the mean of the elements that reach it, so that all of them, on all ranks, share its gradient."""
    hits = mask_padding(axis, x == extremum, shard, False)
    count = torch.ops.autosp.all_reduce_sum(hits.sum(list(dims), keepdim=True), axis.group)
    total = torch.where(hits, x, torch.zeros_like(x)).sum(list(dims), keepdim=True) / count
    return torch.where(extremum.isnan(), extremum, torch.ops.autosp.all_reduce_sum(total, axis.group))


def along_dims_rule(call: OpCall, value: Value, dims: Sequence[int], outputs: int, keeps: bool) -> Strategy:
    """An operator that mixes ``dims`` only: local when the cut dimension is not among them."""
    shard = value.shard
    if shard is None:
        return Strategy(output=REPLICATE if outputs == 1 else [REPLICATE] * outputs)
    if shard.dim in dims:
        raise Refusal(
            f"this operator mixes the {call.axis.parts}",
            f'use unsupported: "gather" to run it on the whole {call.axis.what}',
        )
    cut = shard if keeps else without(shard, dims, call.get("keepdim", False))
    return Strategy(inputs={_main(call): shard}, output=cut if outputs == 1 else [cut] * outputs)


def _main(call: OpCall) -> str:
    return "self" if "self" in call.args else "input"


@register_rule(
    aten.softmax.int, aten.log_softmax.int, aten._softmax, aten._log_softmax, aten.cumsum.default, aten.cumprod.default,
    aten.logcumsumexp.default, aten.sort.default, aten.sort.stable, aten.argsort.default, aten.topk.default,
    aten.cummax.default, aten.glu.default, aten.tril.default, aten.triu.default,
)  # fmt: skip
def along_rule(call: OpCall) -> Strategy:
    """Softmax, scans and sorts keep their shape and are local along any dimension that is not cut."""
    value: Value = call[_main(call)]
    outputs = len(call.out) if isinstance(call.out, (list, tuple)) else 1
    is_triangle = call.target in (aten.tril.default, aten.triu.default)
    dims = [value.ndim - 2, value.ndim - 1] if is_triangle else [value.dim(call.get("dim", -1))]
    return along_dims_rule(call, value, dims, outputs, keeps=True)


@register_rule(
    aten.logsumexp.default, aten.var.correction, aten.std.correction, aten.var.dim, aten.std.dim,
    aten.var_mean.correction,
    aten.norm.ScalarOpt_dim, aten.linalg_vector_norm.default, aten.prod.dim_int, aten.max.dim, aten.min.dim,
    aten.argmax.default, aten.argmin.default, aten.median.dim, aten.mode.default, aten.kthvalue.default,
)  # fmt: skip
def reduce_along_rule(call: OpCall) -> Strategy:
    """Reductions that do not split into sums: local unless they reduce the sequence."""
    value: Value = call[_main(call)]
    outputs = len(call.out) if isinstance(call.out, (list, tuple)) else 1
    return along_dims_rule(call, value, reduced_dims(call, value), outputs, keeps=False)


@register_rule(aten.layer_norm.default, aten.rms_norm.default, seeds=True)
def norm_rule(call: OpCall) -> Strategy:
    """Normalisation over the last dimensions treats each token alone."""
    value: Value = call["input"]
    count = len(call["normalized_shape"])
    return along_dims_rule(call, value, list(range(value.ndim - count, value.ndim)), 1, keeps=True)


@register_rule(aten.one_hot.default)
def one_hot_rule(call: OpCall) -> Strategy:
    """A new last dimension."""
    value: Value = call["self"]
    if value.shard is None:
        return Strategy()
    if known_equal(call["num_classes"], -1):
        raise Refusal("the number of classes depends on the values", "pass num_classes")
    shard, classes = value.shard, call["num_classes"]
    return Strategy(
        inputs={"self": shard},
        output=shard,
        local=lambda c, local: (
            local["self"].unsqueeze(-1) == torch.arange(classes, device=local["self"].device)
        ).long(),
    )
