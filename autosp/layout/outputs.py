"""What the outputs of a local program are."""

from __future__ import annotations

from dataclasses import dataclass

from .placement import Shard


@dataclass(frozen=True)
class OutputSpec:
    """How one output of the local program becomes what the user gets.

    Args:
        shard: the cut of a sharded output, None for a whole value or a number.
        length_index: place among the local program's outputs of the length of its cut dimension.
    """

    shard: Shard | None = None
    length_index: int | None = None
