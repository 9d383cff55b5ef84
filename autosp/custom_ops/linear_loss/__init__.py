"""Losses of a language model straight from hidden states and the head: no ``[tokens, vocabulary]`` tensor.

``vocab_parallel_linear_*`` take the last hidden states and (this rank's rows of) the LM head, and give cross entropy,
log-probabilities, entropy, KL and Jensen-Shannon divergence, alone or over a tensor-parallel group. Usable without the
compiler, without ``tp`` and without Triton.
"""

from .cross_entropy import linear_cross_entropy_sum, vocab_parallel_linear_cross_entropy
from .divergence import vocab_parallel_linear_jsd, vocab_parallel_linear_kl_div
from .token_level import (
    LinearTokenStats,
    vocab_parallel_linear_entropy,
    vocab_parallel_linear_logprobs,
    vocab_parallel_linear_token_stats,
)

__all__ = [
    "LinearTokenStats",
    "linear_cross_entropy_sum",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_entropy",
    "vocab_parallel_linear_jsd",
    "vocab_parallel_linear_kl_div",
    "vocab_parallel_linear_logprobs",
    "vocab_parallel_linear_token_stats",
]
