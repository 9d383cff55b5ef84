"""A counter-based generator written in pointwise operators.

Two rounds of a 64-bit finaliser over a per-call seed, the rank and the element's index. The seed is one integer drawn
from torch's own generator, so ``torch.manual_seed`` reproduces a run; the mask is a function of the seed, so
recomputation repeats it; shards differ by their rank.
"""

from __future__ import annotations

import torch

_MIX = (-49064778989728563, -4265267296055464877)  # murmur3's 64-bit finaliser, as signed integers
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, the increment of splitmix64


def _mix(x: torch.Tensor) -> torch.Tensor:
    for factor in _MIX:
        x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * factor
    return x ^ ((x >> 33) & 0x7FFFFFFF)


def uniform_bits(seed: torch.Tensor, shape, rank: int, device: torch.device) -> torch.Tensor:
    """Independent 24-bit integers (int64), a function of seed, rank and element index."""
    count = 1
    for size in shape:
        count = count * size
    index = torch.arange(count, device=device, dtype=torch.int64).reshape(shape)
    # Python's integers do not wrap; the increment is wrapped to 64 bits here as the tensors' own arithmetic is.
    increment = ((rank + 1) * _GOLDEN + 2**63) % 2**64 - 2**63
    key = _mix(seed + increment)
    return (_mix(_mix(index + key) ^ key) >> 20) & 0xFFFFFF


def draw_seed(device: torch.device, replicated_over: str | None) -> torch.Tensor:
    """One 62-bit integer from torch's generator; the same on all ranks of a group when ``replicated_over`` names it."""
    seed = torch.randint(0, 2**62, (1,), device=device, dtype=torch.int64)
    if replicated_over is not None:
        seed = torch.ops.autosp.all_reduce_sum(seed, replicated_over)
    return seed


def drop(x: torch.Tensor, p: float, seed: torch.Tensor, rank: int) -> torch.Tensor:
    """``x`` with elements dropped with probability ``p`` and the rest scaled by ``1 / (1 - p)``."""
    if p == 1:
        return x * 0  # not zeros_like: the gradient is zero, not absent
    keep = uniform_bits(seed, x.shape, rank, x.device) >= int(p * 2**24)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros_like(x))
