"""Tile sizes of the kernels, by the padded size of a head and the width of its elements.

Those of 16 bits are what torch's flex_attention takes by default on a GPU of compute capability 9.0
(torch/_inductor/template_heuristics/triton.py of torch 2.13), whose kernels have the same shape, but for 8 warps and
fewer queries in the backward of heads of 256, where those spill 1.8 KiB a thread. Those of fp32, which has no tensor
cores at full precision, are the largest that spill little. tests/test_block_compile.py holds registers and shared
memory to bounds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """A tile of ``block_q`` queries and ``block_k`` keys, warps of a program, and stages of its pipeline."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """The power of two, at least 16, that a head of ``size`` elements is held in."""
    return max(16, 1 << (size - 1).bit_length())


# Shared memory of a program on compute capability 9.0; with less, tiles fit the 99 KiB of the smallest devices.
LARGE_ROOM = 227 * 1024


def forward_tiles(size: int, element_size: int, room: int = LARGE_ROOM) -> Tiles:
    if element_size == 4:
        return Tiles(64, 32, 8, 1) if size <= 64 else Tiles(32, 32, 8, 1) if size <= 128 else Tiles(32, 16, 8, 1)
    if room < LARGE_ROOM:
        return Tiles(128, 64, 4, 2) if size <= 64 else Tiles(64, 32, 4, 2) if size <= 128 else Tiles(32, 32, 4, 1)
    return Tiles(128, 128, 4, 3) if size <= 64 else Tiles(128, 64, 8, 3) if size <= 128 else Tiles(64, 32, 4, 3)


def keys_tiles(size: int, element_size: int, room: int = LARGE_ROOM) -> Tiles:
    if element_size == 4:
        return Tiles(32, 32, 8, 1) if size <= 128 else Tiles(16, 32 if room >= LARGE_ROOM else 16, 8, 1)
    if room < LARGE_ROOM:
        return Tiles(64, 64, 4, 2) if size <= 64 else Tiles(32, 64, 4, 1) if size <= 128 else Tiles(32, 32, 8, 1)
    return Tiles(64, 64, 4, 3) if size < 64 else Tiles(64, 128, 8, 3) if size <= 128 else Tiles(32, 64, 8, 2)


def queries_tiles(size: int, element_size: int, room: int = LARGE_ROOM) -> Tiles:
    if element_size == 4:
        return Tiles(32, 32, 8, 1) if size <= 128 else Tiles(32 if room >= LARGE_ROOM else 16, 16, 8, 1)
    if room < LARGE_ROOM:
        return Tiles(64, 64, 4, 2) if size <= 64 else Tiles(64, 32, 4, 1) if size <= 128 else Tiles(32, 32, 8, 1)
    return Tiles(64, 64, 4, 3) if size < 64 else Tiles(128, 64, 8, 3) if size <= 128 else Tiles(64, 64, 8, 2)
