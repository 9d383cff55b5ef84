"""Attention block by block: masks and biases are computed where they are used, never as a queries x keys tensor."""

from .ops import block_attention, block_attention_backward
from .program import BIAS, CAUSAL_BOUNDS, OPEN_BOUNDS, UNBOUNDED, VISIBLE

__all__ = [
    "BIAS",
    "CAUSAL_BOUNDS",
    "OPEN_BOUNDS",
    "UNBOUNDED",
    "VISIBLE",
    "block_attention",
    "block_attention_backward",
]
