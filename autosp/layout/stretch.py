"""A stretch of token-wise nodes that runs a part of the tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .placement import IntLike, Shard, known_equal

TILED = "autosp_tiled"


@dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive token-wise nodes of which only the last is used by others.

    Args:
        nodes: the nodes in the order of the graph.
        tiles: number of parts.
        region: the first of ``tiles`` numbers of checkpointed regions, one a tile, which the backward recomputes one by
            one; None when the nodes belong to a region of the user's already.
    """

    nodes: tuple[fx.Node, ...]
    tiles: int
    region: int | None

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]


def part_of(x: torch.Tensor, shard: Shard, start: IntLike, size: IntLike) -> torch.Tensor:
    """The local positions ``[start, start + size)`` of ``x``, cut as ``shard`` says with an inner factor of 1.

    Where batch and tokens are one dimension, these are as many rows of each sequence of the batch.
    """
    if known_equal(shard.outer, 1):
        return x.narrow(shard.dim, start, size)
    return (
        x.unflatten(shard.dim, (shard.outer, -1)).narrow(shard.dim + 1, start, size).flatten(shard.dim, shard.dim + 1)
    )


def join_parts(parts: Sequence[torch.Tensor], shard: Shard) -> torch.Tensor:
    """The local tensor whose parts, as ``part_of`` takes them, are ``parts``."""
    if len(parts) == 1:
        return parts[0]
    if known_equal(shard.outer, 1):
        return torch.cat(tuple(parts), dim=shard.dim)
    apart = [part.unflatten(shard.dim, (shard.outer, -1)) for part in parts]
    return torch.cat(apart, dim=shard.dim + 1).flatten(shard.dim, shard.dim + 1)
