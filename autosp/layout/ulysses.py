"""Ulysses attention: tokens are exchanged for heads, each rank attends with a block of heads over the whole sequence.

With ``H`` query heads rank ``p`` of ``P`` takes heads ``[p * H // P, (p + 1) * H // P)`` and exactly the key/value
heads which those read; a key/value head that several ranks need is sent to each of them once, un-repeated. Blocks may
differ by one head and may be empty. On the wire a piece is ``[tokens, heads, batch, head size]``, so that what is
received from all ranks is one tensor over the whole sequence without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .axis import Axis
from .padding import pad_rows
from .placement import Shard, product


@dataclass(frozen=True)
class HeadBlocks:
    """Which heads each rank attends with."""

    query: tuple[tuple[int, int], ...]
    key: tuple[tuple[int, int], ...]
    repeats: int

    @classmethod
    def of(cls, ranks: int, query_heads: int, key_heads: int) -> HeadBlocks:
        """Blocks for ``query_heads`` heads that read ``key_heads`` heads in groups (grouped-query attention)."""
        repeats = query_heads // key_heads
        query = tuple((p * query_heads // ranks, (p + 1) * query_heads // ranks) for p in range(ranks))
        key = tuple((lo // repeats, (hi - 1) // repeats + 1) if hi > lo else (0, 0) for lo, hi in query)
        return cls(query=query, key=key, repeats=repeats)

    def is_even(self) -> bool:
        """Every rank sends and receives the same number of heads."""
        sizes = {(q[1] - q[0], k[1] - k[0]) for q, k in zip(self.query, self.key, strict=True)}
        return len(sizes) == 1

    def local_key_index(self, rank: int) -> list[int]:
        """For each local query head, the local key/value head that it reads."""
        (lo, hi), (first, _) = self.query[rank], self.key[rank]
        return [head // self.repeats - first for head in range(lo, hi)]


def _pack(
    tensors: list[torch.Tensor], blocks: list[tuple[tuple[int, int], ...]], ranks: int, peers: range
) -> tuple[torch.Tensor, list]:
    """One flat buffer, destination by destination, each piece ``[tokens, heads, batch, size]``; and the piece sizes."""
    rows = [t.permute(2, 1, 0, 3) for t in tensors]
    if all(_is_partition(b, r.shape[1]) for r, b in zip(rows, blocks, strict=True)):
        # The ranks' heads follow one another: one copy in few operators, however many ranks there are.
        parts = [r.reshape(r.shape[0], ranks, r.shape[1] // ranks, *r.shape[2:]).transpose(0, 1) for r in rows]
        buffer = torch.cat(parts, dim=2).reshape(-1)
        return buffer, [product([rows[0].shape[i] for i in (0, 2, 3)]) * sum(p.shape[2] for p in parts)] * ranks
    pieces = [
        torch.cat([r[:, lo:hi] for r, b in zip(rows, blocks, strict=True) for lo, hi in [b[p]]], dim=1) for p in peers
    ]
    send: list = [0] * ranks
    for p, piece in zip(peers, pieces, strict=True):
        send[p] = piece.numel()
    return torch.cat([piece.reshape(-1) for piece in pieces]), send


def _is_partition(blocks: tuple[tuple[int, int], ...], heads: int) -> bool:
    """The blocks are equal and follow one another without gap or overlap."""
    size = heads // len(blocks)
    return size * len(blocks) == heads and all(b == (p * size, (p + 1) * size) for p, b in enumerate(blocks))


def scatter_heads(
    axis: Axis,
    tensors: list[torch.Tensor],
    blocks: list[tuple[tuple[int, int], ...]],
    cut: Shard,
    peers: range | None = None,
) -> list[torch.Tensor]:
    """Exchange tokens for heads in one all-to-all.

    Args:
        axis: the sequence axis.
        tensors: ``[batch, heads, L, size]`` each, of one dtype and size, all cut over tokens as ``cut``.
        blocks: for each tensor, the heads that each rank receives.
        cut: the cut over tokens.
        peers: the neighbouring ranks that exchange with this one; None is the whole group.

    Returns:
        For each tensor ``[batch, local heads, cut.size, size]``; among peers, ``[batch, local heads, len(peers) * L,
        size]``: the rows that they hold, padding rows included.
    """
    batch, _, block, size = tensors[0].shape
    mine = [b[axis.rank][1] - b[axis.rank][0] for b in blocks]
    among = range(axis.size) if peers is None else peers
    buffer, send = _pack(tensors, blocks, axis.size, among)
    piece = block * sum(mine) * batch * size
    receive = [piece if p in among else 0 for p in range(axis.size)]
    buffer = torch.ops.autosp.all_to_all(buffer, send, receive, axis.group)
    rows = buffer.reshape(len(among) * block, sum(mine), batch, size)
    if peers is not None:
        pass
    elif axis.has_padding(cut):
        rows = rows.narrow(0, cut.start, cut.size)
    else:
        rows = rows.reshape(cut.size, sum(mine), batch, size)
    whole = rows.permute(2, 1, 0, 3)
    return list(whole.split(mine, dim=1))


def gather_heads(
    axis: Axis, x: torch.Tensor, blocks: tuple[tuple[int, int], ...], cut: Shard, peers: range | None = None
) -> torch.Tensor:
    """Exchange heads back for tokens: what ``scatter_heads`` gives to ``[batch, heads, L, size]``."""
    batch, mine, _, size = x.shape
    block = axis.block(cut.length)
    rows = x.permute(2, 1, 0, 3)
    among = range(axis.size) if peers is None else peers
    if peers is None and axis.has_padding(cut):
        rows = pad_rows(rows, cut.start, axis.size * block - cut.start - cut.size)
    counts = [blocks[p][1] - blocks[p][0] for p in among]
    pieces = [block * count * batch * size for count in counts]
    receive: list = [0] * axis.size
    receive[among.start : among.stop] = pieces
    send = [block * mine * batch * size if p in among else 0 for p in range(axis.size)]
    buffer = rows.reshape(-1)
    buffer = torch.ops.autosp.all_to_all(buffer, send, receive, axis.group)
    if len(set(counts)) == 1:
        heads = buffer.reshape(len(among), block, mine, batch, size).permute(3, 1, 0, 2, 4)
        return heads.reshape(batch, block, len(among) * mine, size).transpose(1, 2)
    parts = [
        piece.reshape(block, count, batch, size)
        for piece, count in zip(buffer.split(pieces), counts, strict=True)
        if count
    ]
    return torch.cat(parts, dim=1).permute(2, 0, 1, 3).contiguous().transpose(1, 2)


def local_keys(x: torch.Tensor, blocks: HeadBlocks, rank: int) -> tuple[torch.Tensor, bool]:
    """Key/value heads as the attention kernel needs them: grouped when the grouping is regular, else one a query
    head.
    """
    index = blocks.local_key_index(rank)
    heads = x.shape[1]
    regular = len(index) % heads == 0 and index == [i // (len(index) // heads) for i in range(len(index))]
    if regular:
        return x, heads != len(index)
    return x[:, torch.tensor(index, device=x.device)] if index != list(range(heads)) else x, False


def exchange_all(axis: Axis, q, k, v, blocks: HeadBlocks, q_cut: Shard, k_cut: Shard):
    """Exchange q, k and v: in one all-to-all when their layouts allow, in as few as possible otherwise."""
    same_size = q.shape[3] == k.shape[3] == v.shape[3]
    if q_cut.same_rows(k_cut) and q.dtype == k.dtype == v.dtype:
        if same_size:
            return scatter_heads(axis, [q, k, v], [blocks.query, blocks.key, blocks.key], q_cut)
        if q.shape[3] == k.shape[3]:
            new_q, new_k = scatter_heads(axis, [q, k], [blocks.query, blocks.key], q_cut)
            return [new_q, new_k, *scatter_heads(axis, [v], [blocks.key], k_cut)]
    (new_q,) = scatter_heads(axis, [q], [blocks.query], q_cut)
    if k.shape[3] == v.shape[3] and k.dtype == v.dtype:
        return [new_q, *scatter_heads(axis, [k, v], [blocks.key, blocks.key], k_cut)]
    (new_k,) = scatter_heads(axis, [k], [blocks.key], k_cut)
    return [new_q, new_k, *scatter_heads(axis, [v], [blocks.key], k_cut)]


def empty_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The result of a rank without heads; it hangs on q, k and v so that the rank takes part in their backward."""
    zero = k.sum() * 0 + v.sum() * 0
    return q.reshape(q.shape[0], 0, q.shape[2], v.shape[3]) + zero.to(q.dtype)
