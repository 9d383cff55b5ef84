"""The mesh axis that a graph is partitioned over, as plain numbers and a group name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .placement import IntLike, Shard, known_divides, product, settled

SEQUENCE, VOCABULARY = "sp", "tp"


@dataclass(frozen=True)
class Axis:
    """One mesh axis seen from one rank.

    Args:
        name: name of the mesh dimension, for messages.
        size: number of ranks of the group.
        rank: this rank's place in the group.
        group: name of the process group, as functional collectives take it.
        gradient_reduction: what the edge of a parameter does in the backward: "graph", "engine_mean" or "engine_sum".
        attention: strategy for attention, "auto" or a file of ``layout.attention.strategies``.
    """

    name: str
    size: int
    rank: int
    group: str
    gradient_reduction: str = "graph"
    attention: str = "auto"
    _blocks: dict[Any, IntLike] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def what(self) -> str:
        """What the axis shares, for messages."""
        return "vocabulary" if self.name == VOCABULARY else "sequence"

    @property
    def parts(self) -> str:
        """What the ranks hold some of, for messages."""
        return "ids of the vocabulary" if self.name == VOCABULARY else "tokens of the sequence"

    def divides(self, length: IntLike) -> bool:
        """Whether the group divides ``length``; a symbolic length is settled by a guard, so that even and uneven
        lengths are two compilations and each is exact."""
        if isinstance(length, int):
            return length % self.size == 0
        return known_divides(self.size, length) or bool(length % self.size == 0)

    def block(self, length: IntLike) -> IntLike:
        """Rows that every rank holds of a grid of ``length`` positions: ``ceil(length / P)``.

        An axis serves one compilation and most lengths are one and the same symbol, so each is worked out once.
        """
        key = _key(length)
        block = self._blocks.get(key)
        if block is None:
            rounded = length if self.divides(length) else length + self.size - 1
            block = self._blocks[key] = settled(rounded // self.size)
        return block

    def part(self, length: IntLike, rows: IntLike) -> Axis:
        """The axis as ``rows`` of the local positions of a grid of ``length`` see it: they are the block."""
        part = replace(self)
        part._blocks[_key(length)] = rows
        return part

    def local_dim(self, shard: Shard) -> IntLike:
        """Local size of a cut dimension, padding rows included."""
        return product((shard.outer, self.block(shard.length), shard.inner))

    def local_shape(self, shape: Sequence[IntLike], shard: Shard) -> list[IntLike]:
        """Local sizes of a tensor whose whole sizes are ``shape``."""
        sizes = list(shape)
        sizes[shard.dim] = self.local_dim(shard)
        return sizes

    def has_padding(self, shard: Shard) -> bool:
        """Whether some rank may hold padding rows."""
        return not (shard.is_full and self.divides(shard.length))

    def valid_rows(self, shard: Shard, ndim: int, device: torch.device) -> torch.Tensor:
        """Boolean mask of the valid local rows, of size ``outer * L * inner`` on ``shard.dim`` and 1 on the others."""
        block = self.block(shard.length)
        position = torch.arange(block, device=device) + self.rank * block
        valid = (position >= shard.start) & (position < shard.start + shard.size)
        valid = valid.reshape(1, block, 1).expand(shard.outer, block, shard.inner)
        shape: list[IntLike] = [1] * ndim
        shape[shard.dim] = self.local_dim(shard)
        return valid.reshape(shape)


def _key(length: IntLike) -> Any:
    return length.node.expr if isinstance(length, torch.SymInt) else length
