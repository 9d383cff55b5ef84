"""Which tiles of queries x keys a mask leaves empty, which full, and which need the mask: lists for the kernels.

The map comes from bounds, block by block, of what varies along queries or keys (``intervals``): no tensor is larger
than one element a tile. A tile that is called empty or full is; one that is called partial may be either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import intervals
from .intervals import Interval
from .program import reference
from .tile_program import Input, TileProgram

EMPTY, PARTIAL, FULL = 0, 1, 2
# Tiles looked at in one go, which bounds what is held in float64.
_AT_ONCE = 2**21
# Largest finite score: a bias of minus infinity hides whatever finite number it is added to.
_SCORE = 3.4028234663852886e38


@dataclass(frozen=True)
class TileLists:
    """For each block of queries (or of keys) the tiles to visit.

    Args:
        order: ``[batch or 1, heads or 1, blocks, others]`` int16 or int32: first the partial tiles, then the full ones.
        counts: ``[batch or 1, heads or 1, blocks, 2]`` int32: how many of each.
    """

    order: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Extent:
    """Where the tiles lie.

    Args:
        queries, keys: positions of the rows of q and k, int64, in order.
        first_key, last_key: rows of k that exist.
        bounds: allowed ``query - key``.
    """

    queries: Tensor
    keys: Tensor
    first_key: int
    last_key: int
    bounds: tuple[int, int]


def tile_classes(
    tiles: TileProgram, inputs: list[Tensor], first: tuple[int, int], counts: tuple[int, int], extent: Extent,
    block_q: int, block_k: int,
) -> Tensor:  # fmt: skip
    """``[batch or 1, heads or 1, query blocks, key blocks]`` uint8 of EMPTY, PARTIAL, FULL.

    Args:
        tiles, inputs: the program and what it loads.
        first, counts: first batch row and head, and how many there are.
        extent: where the tiles lie.
        block_q, block_k: size of a tile.
    """
    queries, keys = _blocks(extent.queries, -1, block_q), _blocks(extent.keys, -1, block_k)
    q_blocks, k_blocks = queries[0].shape[-1], keys[0].shape[-1]
    loaded = [_input_bounds(item, tensor, block_q, block_k) for item, tensor in zip(tiles.inputs, inputs, strict=True)]
    batch = max([1, *(low.shape[0] for low, _ in loaded)])
    heads = max([1, *(low.shape[1] for low, _ in loaded)])
    used = str([tiles.score, tiles.mask, *((step.args, step.kwargs) for step in tiles.steps)])
    batch = counts[0] if "'batch'" in used else batch
    heads = counts[1] if "'head'" in used else heads
    found = torch.empty(batch, heads, q_blocks, k_blocks, dtype=torch.uint8, device=extent.queries.device)
    step = max(1, _AT_ONCE // (batch * heads * k_blocks))
    for start in range(0, q_blocks, step):
        part = slice(start, start + step)
        rows = [_rows(item, part) for item in loaded]
        state = _Bounds(tiles, inputs, rows, first, counts, tuple(x[part] for x in queries), keys)
        found[:, :, part] = _classes(state, extent, block_k)
    return found


def merged(classes: Tensor, by_queries: int, by_keys: int) -> Tensor:
    """The classes of tiles that are so many of these together. Queries beyond the end are like the last ones; keys
    beyond the end do not exist, so that a tile that reaches there is not full.
    """
    missing_q, missing_k = -classes.shape[2] % by_queries, -classes.shape[3] % by_keys
    if missing_q:
        classes = torch.cat([classes, classes[:, :, -1:].expand(-1, -1, missing_q, -1)], 2)
    classes = torch.nn.functional.pad(classes, (0, missing_k), value=EMPTY)
    parts = classes.unflatten(3, (-1, by_keys)).unflatten(2, (-1, by_queries))
    low, high = parts.amin((3, 5)), parts.amax((3, 5))
    return torch.where(low == high, low, PARTIAL).to(torch.uint8)


def lists_of_queries(classes: Tensor) -> TileLists:
    """For each block of queries the blocks of keys."""
    return _lists(classes)


def lists_of_keys(classes: Tensor) -> TileLists:
    """For each block of keys the blocks of queries."""
    return _lists(classes.transpose(-1, -2))


def count_tiles(classes: Tensor) -> tuple[int, int, int]:
    """How many tiles are empty, partial, full."""
    empty, partial, full = (int((classes == kind).sum()) for kind in (EMPTY, PARTIAL, FULL))
    return empty, partial, full


def _lists(classes: Tensor) -> TileLists:
    batch, heads, blocks, others = classes.shape
    dtype = torch.int16 if others < 2**15 else torch.int32
    order = torch.empty(classes.shape, dtype=dtype, device=classes.device)
    step = max(1, _AT_ONCE // (batch * heads * others))
    for start in range(0, blocks, step):
        part = classes[:, :, start : start + step]
        # PARTIAL, FULL, EMPTY become 0, 1, 2: a stable sort keeps neighbours together.
        order[:, :, start : start + step] = torch.sort((part + 2) % 3, dim=-1, stable=True)[1]
    counts = torch.stack([(classes == kind).sum(-1) for kind in (PARTIAL, FULL)], -1)
    return TileLists(order, counts.to(torch.int32))


def _blocks(x: Tensor, dim: int, size: int) -> tuple[Tensor, Tensor]:
    """Minima and maxima of blocks along a dimension; the last block repeats its last element."""
    x = x.movedim(dim, -1)
    count = -(-x.shape[-1] // size)
    missing = count * size - x.shape[-1]
    if missing:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1)
    parts = x.reshape(*x.shape[:-1], count, size)
    if x.dtype == torch.bool:
        low, high = parts.all(-1), parts.any(-1)
    else:
        low, high = parts.amin(-1), parts.amax(-1)
    return low.movedim(-1, dim), high.movedim(-1, dim)


def _input_bounds(item: Input, x: Tensor, block_q: int, block_k: int) -> Interval:
    if item.kind != "vector":
        return intervals.unknown(item.dtype, x.device)
    low, high = x, x
    if item.query:
        low, high = _blocks(x, -2, block_q)
    elif item.key:
        low, high = _blocks(x, -1, block_k)
    return intervals.of_blocks(low, high)


def _rows(value: Interval, part: slice) -> Interval:
    """The blocks of queries of a part."""
    low, high = value
    return (low[:, :, part], high[:, :, part]) if low.shape[2] != 1 else value


@dataclass
class _Bounds:
    """Bounds of every reference of a program, for some blocks of queries and all of keys."""

    tiles: TileProgram
    inputs: list[Tensor]
    loaded: list[Interval]
    first: tuple[int, int]
    counts: tuple[int, int]
    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        self.device = self.queries[0].device
        self.steps: dict[int, Interval] = {}
        for step in self.tiles.steps:
            if step.name.startswith("aten::index."):
                self.steps[step.index] = self._read(*step.args, step.dtype)
                continue
            args = [self.of(arg) for arg in step.args]
            kwargs = {key: self.of(arg) for key, arg in step.kwargs.items()}
            self.steps[step.index] = intervals.result(step.name, args, kwargs, step.dtype, self.device)

    def of(self, ref: Any) -> Any:
        kind, at = reference(ref)
        if kind == "step":
            return self.steps[at]
        if kind == "input":
            return self.loaded[at]
        if kind == "index":
            return self._position(at)
        if kind == "score":
            score = intervals.literal(_SCORE, self.device)[0]
            return -score, score
        return intervals.literal(at, self.device) if not kind and isinstance(at, (bool, int, float)) else None

    def _position(self, name: str) -> Interval:
        if name in ("query", "key"):
            low, high = self.queries if name == "query" else self.keys
            shape = (1, 1, -1, 1) if name == "query" else (1, 1, 1, -1)
            return intervals.of_blocks(low.reshape(shape), high.reshape(shape))
        dim = 0 if name == "batch" else 1
        span = torch.arange(self.first[dim], self.first[dim] + self.counts[dim], device=self.device)
        span = span.reshape((-1, 1, 1, 1) if dim == 0 else (1, -1, 1, 1))
        return intervals.of_blocks(span, span)

    def _read(self, table: Any, indices: tuple[Any, ...], dtype: torch.dtype) -> Interval:
        """A table's element where all indices are one number, else anything."""
        values = self.inputs[reference(table)[1]]
        lows, highs = zip(*(self.of(index) for index in indices), strict=True)
        single = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        for dim, (low, high) in enumerate(zip(lows, highs, strict=True)):
            size = values.shape[dim]
            single = single & (low == high) & (low >= -size) & (low < size)
        at = [
            low.nan_to_num(0, 0, 0).clamp(-size, size - 1).long() for low, size in zip(lows, values.shape, strict=True)
        ]
        low, high = intervals.of_blocks(values[tuple(at)], values[tuple(at)])
        open_low, open_high = intervals.unknown(dtype, self.device)
        return torch.where(single, low, open_low), torch.where(single, high, open_high)


def _classes(state: _Bounds, extent: Extent, block_k: int) -> Tensor:
    low, high = extent.bounds
    (q_low, q_high), (k_low, k_high) = ([x.to(torch.int64) for x in pair] for pair in (state.queries, state.keys))
    nearest, farthest = q_low.unsqueeze(-1) - k_high, q_high.unsqueeze(-1) - k_low
    must, may = (nearest >= low) & (farthest <= high), (farthest >= low) & (nearest <= high)
    starts = torch.arange(k_low.shape[0], device=state.device) * block_k
    must = must & (starts >= extent.first_key) & (starts + block_k <= extent.last_key)
    may = may & (starts + block_k > extent.first_key) & (starts < extent.last_key)
    if state.tiles.mask is not None:
        shown = state.of(state.tiles.mask)
        must, may = must & (shown[0] > 0), may & (shown[1] > 0)
    if state.tiles.score is not None:
        may = may & (state.of(state.tiles.score)[1] > -math.inf)
    return torch.where(may, torch.where(must, FULL, PARTIAL), EMPTY).to(torch.uint8)
