"""Losses over logits that are sharded over the vocabulary, or whole: one read of the logits each."""

from .divergences import vocab_parallel_jsd, vocab_parallel_kl_div, vocab_parallel_topk_kl_div
from .functions import (
    TokenStats,
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_logprobs,
    vocab_parallel_token_stats,
)

__all__ = [
    "TokenStats",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_jsd",
    "vocab_parallel_kl_div",
    "vocab_parallel_logprobs",
    "vocab_parallel_token_stats",
    "vocab_parallel_topk_kl_div",
]
