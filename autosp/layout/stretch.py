"""A stretch of token-wise nodes that runs a part of the tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

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
