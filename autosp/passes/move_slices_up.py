"""Whole values that only shards use are made as shards."""

from __future__ import annotations

from torch import fx

from ..layout.axis import Axis


def move_slices_up_pass(gm: fx.GraphModule, *, axis: Axis) -> fx.GraphModule:
    return gm
