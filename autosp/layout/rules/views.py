"""Operators that rearrange elements: reshapes, permutations, slices, joins and repeats.

Reshapes follow the cut by index arithmetic (``placement.map_view``). A slice of a cut dimension is a window of the same
grid: the local tensor stays as it is and only the layout changes, which is what makes causal shifts exact at the
    borders between ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..call import OpCall, Refusal, Strategy, Value
from ..placement import PARTIAL, REPLICATE, known_equal, map_view, shard_of_dim
from ..registry import register_rule

aten = torch.ops.aten


@register_rule(
    aten.view.default, aten._unsafe_view, aten.reshape, aten.flatten.using_ints, aten.unflatten.int, aten.squeeze,
    aten.unsqueeze, aten.view_as, aten.reshape_as,
)  # fmt: skip
def reshape_rule(call: OpCall) -> Strategy:
    """The grid keeps its place in the flat index; the dimension that holds it afterwards is cut."""
    value: Value = call["self"]
    if value.shard is None:
        return Strategy()
    cut = map_view(value.shard, value.shape, call.out_shape)
    if cut is None:
        raise Refusal(
            f"reshaping {list(value.shape)} to {list(call.out_shape)} splits dimension {value.shard.dim} (sharded) or "
            "cannot be followed",
            "keep the sequence dimension whole in this view",
        )
    shape = call.out_shape
    return Strategy(
        inputs={"self": value.shard},
        output=cut,
        local=lambda c, local: local["self"].reshape(c.axis.local_shape(shape, cut)),
        tileable=True,
    )


def permuted_dims(call: OpCall, ndim: int) -> list[int]:
    """For each result dimension, the input dimension that it shows."""
    if call.target is aten.permute.default:
        return [d % ndim for d in call["dims"]]
    order = list(range(ndim))
    if call.target is aten.t.default:
        return order[::-1]
    a, b = ("dim0", "dim1") if "dim0" in call.args else ("axis0", "axis1")
    i, j = call[a] % ndim, call[b] % ndim
    order[i], order[j] = order[j], order[i]
    return order


@register_rule(
    aten.permute, aten.t, aten.transpose.int, aten.swapaxes, aten.swapdims,
)  # fmt: skip
def permute_rule(call: OpCall) -> Strategy:
    """The cut moves with its dimension."""
    value: Value = call["self"]
    if value.shard is None:
        return Strategy()
    order = permuted_dims(call, value.ndim)
    return Strategy(inputs={"self": value.shard}, output=value.shard.at(order.index(value.shard.dim)))


@register_rule(aten.view_as_complex.default, aten.view_as_real.default)
def complex_view_rule(call: OpCall) -> Strategy:
    """Pairs of reals and complex numbers: a last dimension of two goes or comes, the others stay."""
    value: Value = call["self"]
    if value.shard is None:
        return Strategy()
    if call.target is aten.view_as_complex.default and value.shard.dim == value.ndim - 1:
        raise Refusal("real and imaginary parts are two positions of the sequence")
    return Strategy(inputs={"self": value.shard}, output=value.shard)


@register_rule(aten.expand, aten.expand_as)
def expand_rule(call: OpCall) -> Strategy:
    """Other dimensions are stretched, the cut one keeps its local size; a single token that is stretched is read."""
    value: Value = call["self"]
    if value.shard is None:
        return Strategy()
    dim = value.shard.dim + len(call.out_shape) - value.ndim
    if not known_equal(value.shape[value.shard.dim], call.out_shape[dim]):
        other = call.get("other")
        inputs = {"self": REPLICATE, **({"other": other.shard or REPLICATE} if isinstance(other, Value) else {})}
        return Strategy(inputs=inputs, local=lambda c, local: local["self"].expand(*c.out_shape), note="one token read")
    cut, shape = value.shard.at(dim), call.out_shape
    return Strategy(
        inputs={"self": value.shard},
        output=cut,
        local=lambda c, local: local["self"].expand(c.axis.local_shape(shape, cut)),
    )


@register_rule(aten.slice.Tensor, aten.narrow.default)
def slice_rule(call: OpCall) -> Strategy:
    """A slice along the cut dimension is a window of the same grid and moves no data."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None:
        return Strategy()
    dim = value.dim(call["dim"])
    if dim != shard.dim:
        return Strategy(inputs={"self": shard}, output=shard)
    size = call.out_shape[dim]
    if known_equal(size, value.shape[dim]):
        return Strategy(inputs={"self": shard}, output=shard, local=lambda c, local: local["self"])
    if not shard.is_unfactored or call.get("step", 1) != 1:
        raise Refusal("a strided slice, or a slice of a flattened sequence, is not a window of the sequence")
    if known_equal(size, 0):
        raise Refusal("an empty slice of the sequence")
    start = window_start(value.shape[dim], size, call)
    cut = replace(shard, start=shard.start + start, size=size)
    return Strategy(inputs={"self": shard}, output=cut, local=lambda c, local: local["self"], note="window")


def window_start(length, size, call: OpCall):
    """First position of a unit-step slice, counted from the front of a dimension of ``length`` that keeps ``size``.

    The sign of a symbolic bound is settled by a guard.
    """
    start = call["start"]
    start = 0 if start is None else start
    if start >= 0:
        return start
    if "length" in call.args:
        return length + start
    end = call["end"]
    if end is None or (isinstance(end, int) and end >= 2**62) or known_equal(end, length):
        return length - size
    # The kept size already honours clamping, so counting back from the end is right for any negative start.
    end = length + end if end < 0 else end
    return torch.sym_min(end, length) - size


@register_rule(aten.select.int)
def select_rule(call: OpCall) -> Strategy:
    """A point read of a cut dimension: the owner's row, zero elsewhere, summed over the group."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None:
        return Strategy()
    dim = value.dim(call["dim"])
    if dim != shard.dim:
        moved = shard.at(shard.dim - 1) if dim < shard.dim else shard
        return Strategy(inputs={"self": shard}, output=moved)
    if not shard.is_unfactored:
        raise Refusal("a point read of a flattened sequence")
    if value.dtype == torch.bool:
        raise Refusal("a point read of a sharded boolean tensor")
    index = call["index"]
    if isinstance(index, int) and index < 0:
        index = value.shape[dim] + index
    position = shard.start + index

    def read(c: OpCall, local: dict):
        x = local["self"]
        row = torch.arange(1, device=x.device) + position - c.axis.rank * c.axis.block(shard.length)
        mine = (row >= 0) & (row < x.shape[dim])
        taken = x.index_select(dim, row.clamp(0, x.shape[dim] - 1)).squeeze(dim)
        return torch.where(mine.reshape([1] * taken.dim()), taken, torch.zeros_like(taken))

    return Strategy(inputs={"self": shard}, output=PARTIAL, local=read, note="point read: masked read and sum")


@register_rule(
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes, aten.chunk, aten.unbind.int, aten.unsafe_chunk,
    aten.unsafe_split.Tensor, aten.tensor_split.sections,
)  # fmt: skip
def split_rule(call: OpCall) -> Strategy:
    """Pieces along another dimension keep the cut."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None:
        return Strategy(output=[REPLICATE] * len(call.out))
    dim = value.dim(call["dim"])
    if dim == shard.dim:
        raise Refusal(
            "the sequence is split into pieces", 'split another dimension, or gather with unsupported: "gather"'
        )
    removes_dim = call.target is aten.unbind.int
    cut = shard.at(shard.dim - 1) if removes_dim and dim < shard.dim else shard
    return Strategy(inputs={"self": shard}, output=[cut] * len(call.out))


@register_rule(aten.cat.default, aten.concat.default)
def cat_rule(call: OpCall) -> Strategy:
    """Joined along another dimension the cut stays; joined along the cut one the pieces become an outer factor."""
    pieces: list[Value] = list(call["tensors"])
    dim = call["dim"] % len(call.out_shape)
    # torch skips empty one-dimensional operands, whatever the others are (a cache that is still empty).
    full = [p for p in pieces if not (p.ndim == 1 and known_equal(p.shape[0], 0))]
    cut = next((p.shard for p in full if p.shard is not None), None)
    if cut is None:
        return Strategy()
    needed = [cut if any(p is f for f in full) else REPLICATE for p in pieces]
    if cut.dim != dim:
        return Strategy(inputs={"tensors": needed}, output=cut)
    if all(p.shard is not None and p.shard.dim == dim and p.shard.same_rows(cut) for p in full):
        joined = cut if len(full) == 1 else replace(cut, outer=cut.outer * len(full))
        return Strategy(inputs={"tensors": needed}, output=joined)
    raise Refusal(
        "tensors of different kinds are joined along the sequence",
        'join them before the model, or gather with unsupported: "gather"',
    )


@register_rule(aten.stack.default)
def stack_rule(call: OpCall) -> Strategy:
    """A new dimension; the cut moves behind it."""
    pieces: list[Value] = list(call["tensors"])
    cut = next((p.shard for p in pieces if p.shard is not None), None)
    if cut is None:
        return Strategy()
    dim = call["dim"] % len(call.out_shape)
    moved = cut.at(cut.dim + 1) if dim <= cut.dim else cut
    return Strategy(inputs={"tensors": [cut] * len(pieces)}, output=moved)


@register_rule(aten.constant_pad_nd.default, aten.pad.default)
def pad_rule(call: OpCall) -> Strategy:
    """Padding of other dimensions keeps the cut."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None:
        return Strategy()
    pads = call["pad"]
    place = 2 * (value.ndim - 1 - shard.dim)
    mine = pads[place : place + 2]
    if any(not known_equal(p, 0) for p in mine):
        raise Refusal(
            "a sharded sequence is padded", "pad the inputs before the model; whole inputs may be padded anywhere"
        )
    return Strategy(inputs={"self": shard}, output=shard)


@register_rule(aten.roll.default, aten.flip.default)
def roll_rule(call: OpCall) -> Strategy:
    """Rolling or flipping other dimensions keeps the cut."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None:
        return Strategy()
    if not call["dims"] or any(d % value.ndim == shard.dim for d in call["dims"]):
        raise Refusal(
            "a sharded sequence is rolled or flipped", "roll the labels (they are whole), not the hidden states"
        )
    return Strategy(inputs={"self": shard}, output=shard)


@register_rule(aten.repeat.default)
def repeat_rule(call: OpCall) -> Strategy:
    """Tiling the cut dimension multiplies its outer factor."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None:
        return Strategy()
    dim = shard.dim + len(call["repeats"]) - value.ndim
    return Strategy(inputs={"self": shard}, output=replace(shard, dim=dim, outer=shard.outer * call["repeats"][dim]))


@register_rule(aten.repeat_interleave.self_int)
def repeat_interleave_rule(call: OpCall) -> Strategy:
    """Repeating each row of the cut dimension multiplies its inner factor."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None:
        return Strategy()
    if call["dim"] is None:
        raise Refusal("a sharded tensor is flattened by repeat_interleave without a dimension")
    if value.dim(call["dim"]) != shard.dim:
        return Strategy(inputs={"self": shard}, output=shard, local=lambda c, local: c.run(local, output_size=None))
    return Strategy(
        inputs={"self": shard},
        output=replace(shard, inner=shard.inner * call["repeats"]),
        local=lambda c, local: c.run(local, output_size=None),
    )


@register_rule(aten.slice_scatter.default, aten.select_scatter.default)
def scatter_rule(call: OpCall) -> Strategy:
    """A part of another dimension is replaced: both are cut alike. Along the cut dimension it would move rows."""
    value, part = call["self"], call["src"]
    dim = value.dim(call["dim"])
    removed = call.target is aten.select_scatter.default
    cut = value.shard
    if cut is None and part.shard is not None:
        cut = part.shard.at(part.shard.dim + 1) if removed and part.shard.dim >= dim else part.shard
    if cut is None:
        return Strategy()
    if cut.dim == dim:
        if call.homing:  # the dimension runs over tokens, whichever of the two says so
            return Strategy(output=cut if value.shard is not None else shard_of_dim(call.out_shape, dim))
        raise Refusal(
            "a part of a sharded sequence is written", "join the parts before the model, or write whole inputs"
        )
    inner = cut.at(cut.dim - 1) if removed and cut.dim > dim else cut
    return Strategy(inputs={"self": cut, "src": inner}, output=cut)


@register_rule(aten.view_as_complex.default, aten.view_as_real.default)
def complex_rule(call: OpCall) -> Strategy:
    """A last dimension of two numbers becomes one complex number, or the other way round."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None:
        return Strategy()
    if call.target is aten.view_as_complex.default and shard.dim == value.ndim - 1:
        raise Refusal("the real and imaginary parts of a number are on different ranks")
    return Strategy(inputs={"self": shard}, output=shard)
