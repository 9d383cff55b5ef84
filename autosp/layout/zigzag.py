"""The zigzag order of blocks, in which every rank has the same share of a causal attention.

Each rank's block of ``L`` rows is cut in two, ``2 P`` pieces in all; rank ``r`` computes with the pieces ``r`` and
``2 P - 1 - r``, one early and one late (Brandon et al. 2023, arXiv:2311.09431, stripe the sequence for the same end).
Pieces of even number have ``ceil(L / 2)`` rows and those of odd number the rest, so that a rank, which has one of
each, keeps its ``L`` rows.
"""

from __future__ import annotations

import torch

from .axis import Axis
from .placement import IntLike


def piece_rows(piece: int, block: IntLike) -> IntLike:
    """Rows of a piece."""
    half = (block + 1) // 2
    # Not block // 2: symbols do not know that the two make up the block.
    return half if piece % 2 == 0 else block - half


def owner(piece: int, ranks: int) -> int:
    """The rank that computes with a piece."""
    return min(piece, 2 * ranks - 1 - piece)


def to_zigzag(axis: Axis, tensors: list[torch.Tensor], block: IntLike) -> list[torch.Tensor]:
    """Exchange blocks for pieces in one all-to-all.

    Args:
        axis: the sequence axis.
        tensors: ``[batch, heads, L, size]`` each, of one dtype: this rank's block of rows.
        block: ``L``.

    Returns:
        The same shapes: the rows of this rank's early piece, then those of its late one.
    """
    mine = (2 * axis.rank, 2 * axis.rank + 1)
    wanted = (axis.rank, 2 * axis.size - 1 - axis.rank)
    return _exchange(axis, tensors, block, mine, [owner(p, axis.size) for p in mine], wanted, [p // 2 for p in wanted])


def from_zigzag(axis: Axis, tensors: list[torch.Tensor], block: IntLike) -> list[torch.Tensor]:
    """What ``to_zigzag`` gives, or results in its order, back as this rank's block of rows."""
    mine = (axis.rank, 2 * axis.size - 1 - axis.rank)
    wanted = (2 * axis.rank, 2 * axis.rank + 1)
    return _exchange(axis, tensors, block, mine, [p // 2 for p in mine], wanted, [owner(p, axis.size) for p in wanted])


def _exchange(
    axis: Axis, tensors: list[torch.Tensor], block: IntLike, mine: tuple[int, int], to: list[int],
    wanted: tuple[int, int], of: list[int],
) -> list[torch.Tensor]:  # fmt: skip
    """Pieces ``mine``, in the order of the rows, go to ranks ``to``; pieces ``wanted`` come from ranks ``of``."""
    width = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in tensors)
    first = piece_rows(mine[0], block)
    parts = [(0, first), (first, block - first)]
    send: list[IntLike] = [0] * axis.size
    receive: list[IntLike] = [0] * axis.size
    for piece, there, wish, here in zip(mine, to, wanted, of, strict=True):
        send[there] += piece_rows(piece, block) * width
        receive[here] += piece_rows(wish, block) * width
    # A buffer is in the order of the ranks; two pieces of one rank stay in the order in which that rank has them.
    out = [
        x.narrow(2, *parts[i]).reshape(-1) for i in sorted(range(2), key=lambda i: (to[i], i)) for x in tensors
    ]  # fmt: skip
    buffer = torch.ops.autosp.all_to_all(torch.cat(out), send, receive, axis.group)
    came = sorted(range(2), key=lambda i: (of[i], wanted[i]))
    sizes = [[x.shape[0], x.shape[1], piece_rows(wanted[i], block), x.shape[3]] for i in came for x in tensors]
    flat = buffer.split([a * b * c * d for a, b, c, d in sizes])
    pieces = [part.view(size) for part, size in zip(flat, sizes, strict=True)]
    found = dict(zip(came, (pieces[: len(tensors)], pieces[len(tensors) :]), strict=True))
    return [torch.cat(two, dim=2) for two in zip(found[0], found[1], strict=True)]
