"""Vocabulary-parallel layers and losses, and the replacement of a model's LM head."""

from .checkpoint import dense_state_dict, optimizer_state_with_rows, optimizer_state_without_rows
from .clip import clip_grad_norm_
from .embedding import VocabParallelEmbedding
from .linear import VocabParallelLinear
from .lm_head import shard_lm_head, sharded_logits
from .losses import VocabParallelCausalLMLoss, VocabParallelCrossEntropyLoss
from .partition import VocabPartition

__all__ = [
    "VocabParallelCausalLMLoss",
    "VocabParallelCrossEntropyLoss",
    "VocabParallelEmbedding",
    "VocabParallelLinear",
    "VocabPartition",
    "clip_grad_norm_",
    "dense_state_dict",
    "optimizer_state_with_rows",
    "optimizer_state_without_rows",
    "shard_lm_head",
    "sharded_logits",
]
