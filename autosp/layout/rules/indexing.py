"""Lookups by index: embeddings, gathers, advanced indexing, scatters and histograms."""

from __future__ import annotations

import torch

from ..call import OpCall, Refusal, Strategy, Value
from ..placement import PARTIAL, REPLICATE, IntLike, Shard, known_equal
from ..registry import register_rule
from .reduction import mask_padding

aten = torch.ops.aten


@register_rule(aten.embedding.default, seeds=True)
def embedding_rule(call: OpCall) -> Strategy:
    """Rows of a table by token id: cut like the ids."""
    ids: Value = call["indices"]
    if call["weight"].shard is not None:
        raise Refusal("the table of an embedding is a sharded activation")
    if ids.shard is not None and (call["scale_grad_by_freq"] or call["sparse"]):
        raise Refusal(
            "an embedding with scale_grad_by_freq or sparse gradients, which look at all tokens of the batch at once",
            "set scale_grad_by_freq=False and sparse=False",
        )
    if ids.shard is None:
        return Strategy()
    return Strategy(inputs={"indices": ids.shard}, output=ids.shard)


def _same_size(a: IntLike, b: IntLike) -> bool:
    """Whether two sizes agree. These operators admit an index that is shorter than the tensor, so nothing has tied the
    lengths of two inputs together yet; two open lengths are settled by a guard, never an open one by a number.
    """
    if known_equal(a, b):
        return True
    both_open = isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt)
    return both_open and bool(a == b)


@register_rule(aten.gather.default)
def gather_rule(call: OpCall) -> Strategy:
    """Along another dimension, input and index are cut in the same rows."""
    value, index = call["self"], call["index"]
    dim = value.dim(call["dim"])
    cut = value.shard or index.shard
    if cut is None:
        return Strategy()
    if cut.dim == dim:
        raise Refusal("values are gathered along the sharded sequence by position")
    if not _same_size(value.shape[cut.dim], index.shape[cut.dim]):
        raise Refusal("gather reads fewer rows than the sharded dimension has")
    return Strategy(inputs={"self": cut, "index": cut}, output=cut)


@register_rule(aten.index_select.default)
def index_select_rule(call: OpCall) -> Strategy:
    """Rows of another dimension by index keep the cut; rows of the cut one are a masked read and a sum."""
    value, index = call["self"], call["index"]
    if value.shard is None:
        if index.shard is None:
            return Strategy()
        return Strategy(inputs={"index": index.shard}, output=index.shard.at(value.dim(call["dim"])))
    dim = value.dim(call["dim"])
    if dim != value.shard.dim:
        return Strategy(inputs={"self": value.shard}, output=value.shard)
    return _masked_read(call, value, dim, "index")


def _owned_index(c: OpCall, index: torch.Tensor, shard: Shard, size, rows) -> tuple[torch.Tensor, ...]:
    """Local row of a whole index into a cut dimension of whole size ``size``, whether this rank owns it, and whether it
    lies in the dimension at all."""
    index = torch.where(index < 0, index + size, index)
    row = index + shard.start - c.axis.rank * c.axis.block(shard.length)
    return row.clamp(0, rows - 1), (row >= 0) & (row < rows), (index >= 0) & (index < size)


def _taken(taken: torch.Tensor, mine: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """What this rank adds to a read: its own rows; at a position that nobody has NaN, never a plausible number."""
    value = torch.where(mine, taken, torch.zeros_like(taken))
    if taken.dtype.is_floating_point:
        value = torch.where(exists, value, torch.full_like(taken, float("nan")))
    return value


def _masked_read(call: OpCall, value: Value, dim: int, name: str) -> Strategy:
    shard = value.shard
    if not shard.is_unfactored or value.dtype == torch.bool:
        raise Refusal("positions of a flattened or boolean sequence are read by index")

    def read(c: OpCall, local: dict):
        x = local["self"]
        row, mine, exists = _owned_index(c, local[name], shard, value.shape[dim], x.shape[dim])
        taken = x.index_select(dim, row.reshape(-1))
        shape = [1] * taken.dim()
        shape[dim] = taken.shape[dim]
        return _taken(taken, mine.reshape(shape), exists.reshape(shape))

    return Strategy(inputs={"self": shard}, output=PARTIAL, local=read, note="read by position: masked read and sum")


@register_rule(aten.index.Tensor)
def index_rule(call: OpCall) -> Strategy:
    """Advanced indexing by integer tensors, with the index block in place of the indexed dimensions."""
    value: Value = call["self"]
    indices: list[Value | None] = list(call["indices"])
    cuts = [i.shard for i in indices if i is not None and i.shard is not None]
    if value.shard is None and not cuts:
        return Strategy()
    indexed = [d for d, i in enumerate(indices) if i is not None]
    if any(indices[d].dtype == torch.bool for d in indexed):
        raise Refusal("a boolean mask selects a number of tokens that depends on the values")
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        raise Refusal("index tensors with slices between them")
    block = max(indices[d].ndim for d in indexed)
    if value.shard is None:
        return _indexed_by_shards(indices, indexed, block)
    if cuts:
        raise Refusal(
            "a sharded tensor is indexed by a sharded index", "index whole tensors, or mark the region as token-local"
        )
    dim = value.shard.dim
    if dim in indexed:
        return _indexed_read(value, indexed)
    moved = value.shard if dim < indexed[0] else value.shard.at(dim - len(indexed) + block)
    return Strategy(inputs={"self": value.shard}, output=moved)


def _indexed_by_shards(indices, indexed: list[int], block: int) -> Strategy:
    """A whole table read by cut indices: the result is cut along the index block."""
    first = next(i for i in indices if i is not None and i.shard is not None)
    cut = first.shard.at(first.shard.dim + block - first.ndim)
    needed = []
    for index in indices:
        if index is None:
            needed.append(None)
            continue
        dim = cut.dim - (block - index.ndim)
        stretched = dim < 0 or (known_equal(index.shape[dim], 1) and not known_equal(cut.global_size, 1))
        needed.append(REPLICATE if stretched else cut.at(dim))
    return Strategy(inputs={"indices": needed}, output=cut.at(cut.dim + indexed[0]))


def _indexed_read(value: Value, indexed: list[int]) -> Strategy:
    """Positions of the cut dimension read by whole indices: each is owned by one rank."""
    shard = value.shard
    if not shard.is_unfactored or value.dtype == torch.bool:
        raise Refusal(
            "tokens of a flattened sequence are picked by index, which may move them between ranks",
            "mark the region as token-local if it treats each token alone",
        )

    def read(c: OpCall, local: dict):
        x, indices = local["self"], list(local["indices"])
        row, mine, exists = _owned_index(c, indices[shard.dim], shard, value.shape[shard.dim], x.shape[shard.dim])
        indices[shard.dim] = row
        taken = aten.index.Tensor(x, indices)
        mine, exists, *_ = torch.broadcast_tensors(mine, exists, *(indices[d] for d in indexed if d != shard.dim))
        shape = [1] * indexed[0] + list(mine.shape) + [1] * (taken.dim() - indexed[0] - mine.dim())
        return _taken(taken, mine.reshape(shape), exists.reshape(shape))

    return Strategy(inputs={"self": shard}, output=PARTIAL, local=read, note="read by position: masked read and sum")


@register_rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def scatter_rule(call: OpCall) -> Strategy:
    """Along another dimension everything is cut in the same rows; adding up tokens is a sum over the group."""
    value, index = call["self"], call["index"]
    source = call.get("src")
    dim = value.dim(call["dim"])
    cut = value.shard or index.shard
    if cut is None:
        return Strategy()
    if cut.dim != dim and _same_size(value.shape[cut.dim], index.shape[cut.dim]):
        inputs = {"self": cut, "index": cut}
        if isinstance(source, Value):
            inputs["src"] = cut
        return Strategy(inputs=inputs, output=cut)
    if call.target is not aten.scatter_add.default or value.shard is not None or cut.dim != dim:
        raise Refusal("values are scattered along the sharded sequence, or into a tensor with other rows")

    def add_up(c: OpCall, local: dict):
        src = mask_padding(c.axis, local["src"], index.shard, 0)
        mine = c.run(local, self=torch.zeros_like(local["self"]), src=src)
        return local["self"] + torch.ops.autosp.all_reduce_sum(mine, c.axis.group)

    return Strategy(inputs={"index": cut, "src": cut}, output=REPLICATE, local=add_up, note="sum over tokens")


@register_rule(aten.histc.default)
def histc_rule(call: OpCall) -> Strategy:
    """Counts over tokens are summed over the group; padding rows are moved out of the range."""
    value: Value = call["self"]
    if value.shard is None:
        return Strategy()
    low, high = call["min"], call["max"]
    if low == high:
        raise Refusal("the range of histc depends on the values", "pass min and max")

    def count(c: OpCall, local: dict):
        return c.run(local, self=mask_padding(c.axis, local["self"], value.shard, low - 1))

    return Strategy(inputs={"self": value.shard}, output=PARTIAL, local=count, note="sum over tokens")


@register_rule(aten.index_add.default, aten.index_put.default)
def index_add_rule(call: OpCall) -> Strategy:
    """Writing into rows by index is local only on whole tensors."""
    if any(value.shard is not None for _, value in call.values()):
        raise Refusal("tokens are written by index, which may move them between ranks")
    return Strategy()
