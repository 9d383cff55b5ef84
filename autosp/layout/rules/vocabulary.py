"""Logits on the vocabulary axis: the head that makes them, and what reads them along the vocabulary.

Most operators on sharded logits need nothing of their own here: arithmetic, views, sums and maxima follow a cut
vocabulary by the rules that follow a cut sequence. What is here either runs along the vocabulary in a form that sums do
not cover, or is an operator of autosp's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..axis import VOCABULARY, Axis
from ..call import OpCall, Refusal, Strategy, Value
from ..placement import PARTIAL, REPLICATE, IntLike, Shard, shard_of_dim
from ..registry import find_rule, register_rule
from .reduction import reduced_dims

aten = torch.ops.aten


class Columns(NamedTuple):
    """The columns of a cut vocabulary that this rank holds: ``count`` of its local ones from ``offset`` on, which are
    the ids from ``first`` on of ``size`` in all."""

    offset: int
    count: int
    first: int
    size: int

    @property
    def bounds(self) -> list[int]:
        """As the operators of ``custom_ops.vocab_parallel`` take them."""
        return [self.first, self.first + self.count, -1]


def own_columns(axis: Axis, shard: Shard) -> Columns:
    """This rank's part of a cut dimension.

    Raises:
        Refusal: the vocabulary is a factor of the dimension.
    """
    if not shard.is_unfactored:
        raise Refusal("the vocabulary is flattened together with other dimensions")
    block, stop = axis.block(shard.length), shard.start + shard.size
    low = min(max(axis.rank * block, shard.start), stop)
    high = max(low, min((axis.rank + 1) * block, stop))
    return Columns(min(low - axis.rank * block, block) if high > low else 0, high - low, low - shard.start, shard.size)


def vocabulary_last(x: torch.Tensor, shard: Shard, columns: Columns) -> torch.Tensor:
    """This rank's columns without padding, their dimension moved to the end; no copy."""
    whole = columns.count == x.shape[shard.dim]
    rows = x if whole else x.narrow(shard.dim, columns.offset, columns.count)
    return rows if shard.dim == x.dim() - 1 else rows.movedim(shard.dim, -1)


def _restored(x: torch.Tensor, shard: Shard, columns: Columns, block: IntLike) -> torch.Tensor:
    """The inverse of ``vocabulary_last``; padding columns are zero."""
    if columns.count != block:
        x = torch.nn.functional.pad(x, (columns.offset, block - columns.offset - columns.count))
    return x if shard.dim == x.dim() - 1 else x.movedim(-1, shard.dim).contiguous()


def row_stats(axis: Axis, logits: torch.Tensor, index: torch.Tensor | None, columns: Columns, **flags) -> tuple:
    """``autosp::vocab_row_stats`` over the axis: ``logits`` ``[..., columns]``, ``index`` int64 ``[...]`` or none.

    Args:
        flags: ``ignore_index``, ``mean``, ``skip_ignored``.
    """
    if index is None:
        index = torch.empty((*logits.shape[:-1], 0), dtype=torch.int64, device=logits.device)
    ignore = flags.pop("ignore_index", -100)
    asked = [False, flags.get("mean", False), False, flags.get("skip_ignored", False), False]
    return torch.ops.autosp.vocab_row_stats(
        logits, index.contiguous(), None, [1.0, 0.0], columns.bounds, axis.group, ignore, asked
    )


def read_ids(axis: Axis, x: torch.Tensor, ids: torch.Tensor, shard: Shard, columns: Columns) -> torch.Tensor:
    """What this rank adds to ``x.gather(dim, ids)`` for global ids: its own columns, zero elsewhere; an id that nobody
    has is NaN, never a plausible number."""
    column = (ids - columns.first + columns.offset).clamp(0, x.shape[shard.dim] - 1)
    mine = (ids >= columns.first) & (ids < columns.first + columns.count)
    taken = x.gather(shard.dim, column)
    taken = torch.where(mine, taken, torch.zeros_like(taken))
    if not taken.dtype.is_floating_point:
        return taken
    exists = (ids >= 0) & (ids < columns.size)
    return torch.where(exists, taken, torch.full_like(taken, float("nan")))


def on_vocabulary(*targets):
    """Register a rule for the vocabulary axis; where the call does not run along the vocabulary, the rule answers None
    and the operator's general rule is asked."""

    def decorate(rule):
        def asked(call: OpCall) -> Strategy:
            strategy = rule(call)
            if strategy is not None:
                return strategy
            general = find_rule(call.target)
            if general is None:
                raise Refusal("this operator has no rule, so its effect on a shard is unknown")
            return general(call)

        asked.__name__, asked.__doc__ = rule.__name__, rule.__doc__
        register_rule(*targets, axis=VOCABULARY)(asked)
        return rule

    return decorate


@on_vocabulary(aten.log_softmax.int, aten.softmax.int, aten._log_softmax.default, aten._softmax.default)
def softmax_rule(call: OpCall) -> Strategy | None:
    """Over a cut vocabulary: the result is cut alike; a maximum and a sum a row travel."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None or value.dim(call["dim"]) != shard.dim:
        return None
    columns, dtype = own_columns(call.axis, shard), call.out.dtype
    log = "log" in call.target._schema.name

    def local_softmax(c: OpCall, local: dict):
        x = local["self"]
        z = vocabulary_last(x, shard, columns)
        out = torch.ops.autosp.vocab_softmax(z, log, dtype, c.axis.group)
        return _restored(out, shard, columns, x.shape[shard.dim])

    return Strategy(inputs={"self": shard}, output=shard, local=local_softmax, note="softmax over the vocabulary")


@on_vocabulary(aten.logsumexp.default)
def logsumexp_rule(call: OpCall) -> Strategy | None:
    """Over a cut vocabulary: from the statistics of each shard, whole on every rank."""
    value: Value = call["self"]
    shard = value.shard
    dims = reduced_dims(call, value)
    if shard is None or shard.dim not in dims:
        return None
    if dims != [shard.dim]:
        raise Refusal("logsumexp over the vocabulary and another dimension together", "take them one after the other")
    columns = own_columns(call.axis, shard)

    def local_lse(c: OpCall, local: dict):
        lse = row_stats(c.axis, vocabulary_last(local["self"], shard, columns), None, columns)[1]
        lse = lse.to(c.out.dtype)
        return lse.unsqueeze(shard.dim) if c["keepdim"] else lse

    return _whole(shard, local_lse)


def _whole(shard: Shard, local, output=REPLICATE, name: str = "self") -> Strategy:
    """A result that is whole on every rank from a cut operand, by operators whose gradients are exact already."""
    return Strategy(inputs={name: shard}, output=output, local=local, sharded=False, note="over the vocabulary")


@on_vocabulary(aten.gather.default)
def gather_rule(call: OpCall) -> Strategy | None:
    """Values by id: each is one rank's, the others give zero."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None or value.dim(call["dim"]) != shard.dim:
        return None
    columns = own_columns(call.axis, shard)

    def read(c: OpCall, local: dict):
        return read_ids(c.axis, local["self"], local["index"], shard, columns)

    return Strategy(inputs={"self": shard}, output=PARTIAL, local=read, note="read by id: masked read and sum")


def _candidates(axis: Axis, x: torch.Tensor, shard: Shard, columns: Columns, count: int) -> tuple:
    """``(values, ids)`` of the ``count`` largest columns of every rank, ``[..., ranks * count]``, vocabulary last, in
    rank order; without gradient."""
    z = vocabulary_last(x.detach(), shard, columns)
    missing = count - columns.count
    if missing > 0:
        lowest = float("-inf") if z.dtype.is_floating_point else torch.iinfo(z.dtype).min
        z = torch.nn.functional.pad(z, (0, missing), value=lowest)
    if count == 1:
        # The first of equal ones, as argmax gives.
        places = z.argmax(-1, keepdim=True)
        values = z.gather(-1, places)
    else:
        values, places = z.topk(count, dim=-1)
    # A place that is no column of this rank is nobody's id.
    ids = torch.where(places < columns.count, places + columns.first, columns.size)
    return _every(axis, values), _every(axis, ids)


def _every(axis: Axis, x: torch.Tensor) -> torch.Tensor:
    ranks = axis.size
    every = torch.ops.autosp.all_gather_sequence(
        x.unsqueeze(0).contiguous(), 0, ranks, ranks, 0, 1, 1, False, axis.group
    )
    return every.movedim(0, -2).reshape(*x.shape[:-1], ranks * x.shape[-1])


def _largest(axis: Axis, x: torch.Tensor, shard: Shard, columns: Columns) -> torch.Tensor:
    """Id of the largest column of each row, vocabulary last with size 1."""
    values, ids = _candidates(axis, x, shard, columns, 1)
    return ids.gather(-1, values.argmax(-1, keepdim=True))


@on_vocabulary(aten.argmax.default)
def argmax_rule(call: OpCall) -> Strategy | None:
    """The largest of each rank's largest, the first of equal ones."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None or (call["dim"] is not None and value.dim(call["dim"]) != shard.dim):
        return None
    if call["dim"] is None:
        raise Refusal("argmax over all dimensions at once", "give dim=-1")
    columns = own_columns(call.axis, shard)

    def local_argmax(c: OpCall, local: dict):
        ids = _largest(c.axis, local["self"], shard, columns).movedim(-1, shard.dim)
        return ids if c["keepdim"] else ids.squeeze(shard.dim)

    return _whole(shard, local_argmax)


def _read_whole(axis: Axis, x: torch.Tensor, ids: torch.Tensor, shard: Shard, columns: Columns) -> torch.Tensor:
    return torch.ops.autosp.all_reduce_sum(read_ids(axis, x, ids, shard, columns), axis.group)


@on_vocabulary(aten.max.dim)
def max_rule(call: OpCall) -> Strategy | None:
    """The largest column and its id; the gradient goes to that column."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None or value.dim(call["dim"]) != shard.dim:
        return None
    columns = own_columns(call.axis, shard)

    def local_max(c: OpCall, local: dict):
        x = local["self"]
        ids = _largest(c.axis, x, shard, columns).movedim(-1, shard.dim)
        values = _read_whole(c.axis, x, ids, shard, columns)
        return (values, ids) if c["keepdim"] else (values.squeeze(shard.dim), ids.squeeze(shard.dim))

    return _whole(shard, local_max, [REPLICATE, REPLICATE])


@on_vocabulary(aten.topk.default)
def topk_rule(call: OpCall) -> Strategy | None:
    """The largest of each rank's largest; gradients go to the columns chosen."""
    value: Value = call["self"]
    shard = value.shard
    if shard is None or value.dim(call["dim"]) != shard.dim:
        return None
    if not call["largest"] or not isinstance(call["k"], int):
        raise Refusal("the smallest columns of a vocabulary, or an open number of them")
    columns, k = own_columns(call.axis, shard), call["k"]

    def local_topk(c: OpCall, local: dict):
        x = local["self"]
        values, ids = _candidates(c.axis, x, shard, columns, min(k, x.shape[shard.dim]))
        ids = ids.gather(-1, values.topk(k, dim=-1).indices).movedim(-1, shard.dim).contiguous()
        return _read_whole(c.axis, x, ids, shard, columns), ids

    return _whole(shard, local_topk, [REPLICATE, REPLICATE])


@on_vocabulary(aten.randint.low)
def seed_rule(call: OpCall) -> Strategy | None:
    """The seed of dropout on a shard of the sequence: ranks that share a vocabulary agree on it."""
    if call["high"] != 2**62:
        return None
    return Strategy(local=lambda c, local: torch.ops.autosp.all_reduce_sum(c.run(local), c.axis.group))


def head_rule(call: OpCall) -> Strategy:
    """``autosp::vocab_linear``: on the sequence axis a linear layer; on the vocabulary axis what starts the cut."""
    value: Value = call["x"]
    if call.axis.name == VOCABULARY:
        cut = shard_of_dim(call.out_shape, len(call.out_shape) - 1)
        return Strategy(
            output=cut,
            local=lambda c, local: torch.ops.autosp.vocab_logits(
                local["x"], local["weight"], local["bias"], c["size"], c.axis.group
            ),
            sharded=False,
            note="this rank's part of the vocabulary",
        )
    shard = value.shard
    if shard is None:
        return Strategy()
    if shard.dim == value.ndim - 1:
        raise Refusal("the LM head contracts the sharded dimension")
    return Strategy(inputs={"x": shard}, output=shard)


def embedding_rule(call: OpCall) -> Strategy:
    """``autosp::vocab_embedding``: rows by id, cut like the ids; on the vocabulary axis it sums over its group
    itself."""
    shard = call["ids"].shard
    return Strategy() if shard is None else Strategy(inputs={"ids": shard}, output=shard)


def collective_rule(call: OpCall) -> Strategy:
    """Collectives of the sequence axis on logits: a cut of another dimension stays."""
    value: Value = call["x"]
    shard = value.shard
    if shard is None:
        return Strategy()
    if call.get("dim") is not None and call["dim"] == shard.dim:
        raise Refusal("a collective of the sequence moves the vocabulary")
    return Strategy(inputs={"x": shard}, output=shard)


def register_head_rules() -> None:
    """Join autosp's own operators to the rules, once they are registered with torch."""
    ops = torch.ops.autosp
    register_rule(ops.vocab_linear.default, seeds=True)(head_rule)
    register_rule(ops.vocab_embedding.default, seeds=True)(embedding_rule)
    register_rule(
        ops.shard_sequence.default, ops.all_gather_sequence.default, ops.reduce_scatter_sequence.default,
        ops.all_reduce_sum.default, ops.enter_sharded.default, axis=VOCABULARY,
    )(collective_rule)  # fmt: skip
