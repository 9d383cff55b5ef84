"""``autosp::ring_attention``: keys and values go round the group, block by block (Liu et al. 2023, arXiv:2310.01889).

With ``zigzag`` a rank has an early and a late half of a block (``layout/zigzag.py``), each met by itself.

The forward merges the results of the blocks by their log-sum-exp; the backward sends keys, values and their gradients
round once more. One node before dispatch; below autograd point-to-point exchanges and ``autosp::block_attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import block_attention  # noqa: F401 - defines the operators that a ring is made of
from ._library import define, group_rank, group_size

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class _Piece:
    """A run of rows: its number in the order of the sequence, where it begins here and in the sequence, its rows."""

    number: int
    first: Any
    rows: Any
    position: Any

    def of(self, x: Tensor) -> Tensor:
        return x.narrow(2, self.first, self.rows)


@dataclass(frozen=True)
class _Ring:
    """The arguments of the operator besides tensors, seen from this rank."""

    numbers: Sequence[Any]
    program: str
    scale: float
    rows: Sequence[Any]
    starts: Sequence[Any]
    sizes: Sequence[Any]
    bounds: Sequence[Any]
    group: str
    zigzag: bool = False

    @property
    def ranks(self) -> int:
        return group_size(self.group)

    def settings(self, q: _Piece, k: _Piece) -> tuple[Any, ...]:
        """Settings of ``autosp::block_attention`` for a piece of the queries and one of the keys."""
        origin = [0, 0, q.position - self.starts[0], k.position - self.starts[1]]
        return list(self.numbers), self.program, self.scale, origin, list(self.sizes), list(self.bounds)

    def pieces(self, rank: int, which: int) -> list[_Piece]:
        """The runs of rows that a rank has, of queries (0) or keys (1)."""
        block = self.rows[which]
        if not self.zigzag:
            return [_Piece(rank, 0, block, rank * block)]
        numbers, half = (rank, 2 * self.ranks - 1 - rank), (block + 1) // 2
        sizes = [half if number % 2 == 0 else block - half for number in numbers]
        places = [number // 2 * block + number % 2 * half for number in numbers]
        return [_Piece(numbers[0], 0, sizes[0], places[0]), _Piece(numbers[1], sizes[0], sizes[1], places[1])]

    def pairs(self, step: int) -> list[tuple[int, _Piece, int, _Piece]]:
        """The pieces of queries with those of the keys that are here after ``step`` passes, and their numbers among the
        two or one. In zigzag order nobody sees a later piece.
        """
        rank = group_rank(self.group)
        keys = self.pieces((rank - step) % self.ranks, 1)
        return [
            (i, q, j, k)
            for i, q in enumerate(self.pieces(rank, 0))
            for j, k in enumerate(keys)
            if not self.zigzag or k.number <= q.number
        ]

    def shapes(self, step: int, like: Sequence[Tensor]) -> list[list[Tensor]]:
        """Zeros for each piece of the queries, of the keys that are here, and of their values."""
        rank = group_rank(self.group)
        keys = self.pieces((rank - step) % self.ranks, 1)
        pieces = (self.pieces(rank, 0), keys, keys)
        return [[torch.zeros_like(piece.of(x)) for piece in some] for some, x in zip(pieces, like, strict=True)]

    def pass_on(self, *tensors: Tensor) -> list[Tensor]:
        """Each rank's tensors go to the next rank, in one exchange."""
        flat = torch.cat([x.reshape(-1) for x in tensors])
        rank, count = group_rank(self.group), flat.numel()
        send = [count if p == (rank + 1) % self.ranks else 0 for p in range(self.ranks)]
        receive = [count if p == (rank - 1) % self.ranks else 0 for p in range(self.ranks)]
        flat = _c10d.wait_tensor(_c10d.all_to_all_single(flat, receive, send, self.group))
        return [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True)]


def _merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Results over two sets of keys as the result over both; ``out`` is wide, a row that sees nothing has -inf."""
    both = torch.logaddexp(lse, new_lse)
    zero = both.isinf()
    old_share = torch.where(zero, 0.0, torch.exp(lse - both)).unsqueeze(-1)
    new_share = torch.where(zero, 0.0, torch.exp(new_lse - both)).unsqueeze(-1)
    return out * old_share + new_out.to(out.dtype) * new_share, both


def _forward(ring: _Ring, q: Tensor, k: Tensor, v: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    attend = torch.ops.autosp.block_attention
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for step in range(ring.ranks):
        if step:
            k, v = ring.pass_on(k, v) if k.dtype == v.dtype else (*ring.pass_on(k), *ring.pass_on(v))
        for i, rows, _, keys in ring.pairs(step):
            part, lse = attend(rows.of(q), keys.of(k), keys.of(v), leaves, *ring.settings(rows, keys))
            found[i] = _merge(*found[i], part, lse) if i in found else (part.to(lse.dtype), lse)
    out, lse = (torch.cat([found[i][which] for i in sorted(found)], dim=2) for which in range(2))
    return out.to(q.dtype), lse


def _backward(
    ring: _Ring, grad: Tensor, grad_lse: Tensor | None, saved: Sequence[Tensor], leaves: Sequence[Tensor],
    wanted: Sequence[bool],
):  # fmt: skip
    q, k, v, out, lse = saved
    own_types = k.dtype, v.dtype
    wide = lse.dtype
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    leaf_grads = [torch.zeros(x.shape if want else [0], dtype=wide, device=x.device)
                  for x, want in zip(leaves, wanted, strict=True)]  # fmt: skip
    for step in range(ring.ranks):
        if step:
            # Gradients travel in the width in which they are summed.
            k, v = ring.pass_on(k, v) if k.dtype == v.dtype else (*ring.pass_on(k), *ring.pass_on(v))
            dk, dv = ring.pass_on(dk, dv)
        parts: list[list[Any]] = [[], [], []]
        for i, rows, j, keys in ring.pairs(step):
            upstream = None if grad_lse is None else rows.of(grad_lse)
            found = torch.ops.autosp.block_attention_backward(
                rows.of(grad), upstream, rows.of(q), keys.of(k), keys.of(v), rows.of(out), rows.of(lse), leaves,
                *ring.settings(rows, keys), list(wanted),
            )  # fmt: skip
            for where, place, value in zip(parts, (i, j, j), found[:3], strict=True):
                where.append((place, value.to(wide)))
            leaf_grads = [a + b.to(wide) for a, b in zip(leaf_grads, found[3:], strict=True)]
        dq, dk, dv = (
            x + _joined(part, pieces)
            for x, part, pieces in zip((dq, dk, dv), parts, ring.shapes(step, (dq, dk, dv)), strict=True)
        )
    dk, dv = ring.pass_on(dk, dv)
    return dq.to(q.dtype), dk.to(own_types[0]), dv.to(own_types[1]), leaf_grads


def _joined(parts: list[tuple[int, Tensor]], empty: list[Tensor]) -> Tensor:
    """Sums of the parts of each piece, side by side; a piece without a part is zero."""
    sums: list[Tensor] = list(empty)
    for place, value in parts:
        sums[place] = sums[place] + value
    return torch.cat(sums, dim=2) if len(sums) > 1 else sums[0]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring, q, k, v, *leaves):
        out, lse = _forward(ring, q, k, v, leaves)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *leaves)
        ctx.ring = ring
        return out, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        saved, leaves = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        grad = torch.zeros_like(saved[3]) if grad is None else grad
        wanted = ctx.needs_input_grad[4:]
        dq, dk, dv, leaf_grads = _backward(ctx.ring, grad, grad_lse, saved, leaves, wanted)
        grads = [g.to(x.dtype) if want else None for g, x, want in zip(leaf_grads, leaves, wanted, strict=True)]
        return None, dq, dk, dv, *grads


def _fake(q, k, v, leaves, *_):
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, rows, _ = q.shape
    return q.new_empty(batch, heads, rows, v.shape[-1]), q.new_empty(batch, heads, rows, dtype=wide)


ring_attention = define(
    "ring_attention(Tensor q, Tensor k, Tensor v, Tensor[] leaves, SymInt[] numbers, str program, float scale, "
    "SymInt[] rows, SymInt[] starts, SymInt[] sizes, SymInt[] bounds, str group, bool zigzag=False) -> "
    "(Tensor, Tensor)",
    forward=lambda q, k, v, leaves, *settings: _forward(_Ring(*settings), q, k, v, leaves),
    fake=_fake,
    autograd=lambda q, k, v, leaves, *settings: _RingAttention.apply(_Ring(*settings), q, k, v, *leaves),
)
