"""Sequence parallelism for unmodified PyTorch models through ``torch.compile(model, backend="autosp")``.

Public names are imported when they are first used, so that ``import autosp`` costs nothing and works without triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosp.checking import CheckResult, check
    from autosp.config import AutoSPConfig
    from autosp.custom_ops.linear_loss import (
        LinearTokenStats,
        vocab_parallel_linear_cross_entropy,
        vocab_parallel_linear_entropy,
        vocab_parallel_linear_jsd,
        vocab_parallel_linear_kl_div,
        vocab_parallel_linear_logprobs,
        vocab_parallel_linear_token_stats,
    )
    from autosp.custom_ops.vocab_parallel import (
        TokenStats,
        vocab_parallel_cross_entropy,
        vocab_parallel_entropy,
        vocab_parallel_jsd,
        vocab_parallel_kl_div,
        vocab_parallel_logprobs,
        vocab_parallel_token_stats,
        vocab_parallel_topk_kl_div,
    )
    from autosp.errors import (
        AutoSPError,
        ConfigError,
        InputError,
        InternalError,
        RankMismatchError,
        UnsupportedGraphError,
    )
    from autosp.inputs import prepare_autosp_inputs, prepare_batch
    from autosp.layers import (
        VocabParallelCausalLMLoss,
        VocabParallelCrossEntropyLoss,
        VocabParallelEmbedding,
        VocabParallelLinear,
        clip_grad_norm_,
        dense_state_dict,
        shard_lm_head,
        sharded_logits,
    )
    from autosp.layout.attention.opaque import register_attention
    from autosp.layout.call import Refusal, Strategy
    from autosp.layout.registry import register_rule
    from autosp.mesh import initialize

__version__ = "0.1.0"

_HOME = {
    "AutoSPConfig": "autosp.config",
    "AutoSPError": "autosp.errors",
    "CheckResult": "autosp.checking",
    "ConfigError": "autosp.errors",
    "InputError": "autosp.errors",
    "InternalError": "autosp.errors",
    "LinearTokenStats": "autosp.custom_ops.linear_loss",
    "RankMismatchError": "autosp.errors",
    "Refusal": "autosp.layout.call",
    "Strategy": "autosp.layout.call",
    "TokenStats": "autosp.custom_ops.vocab_parallel",
    "UnsupportedGraphError": "autosp.errors",
    "VocabParallelCausalLMLoss": "autosp.layers",
    "VocabParallelCrossEntropyLoss": "autosp.layers",
    "VocabParallelEmbedding": "autosp.layers",
    "VocabParallelLinear": "autosp.layers",
    "clip_grad_norm_": "autosp.layers",
    "dense_state_dict": "autosp.layers",
    "check": "autosp.checking",
    "initialize": "autosp.mesh",
    "prepare_autosp_inputs": "autosp.inputs",
    "prepare_batch": "autosp.inputs",
    "register_attention": "autosp.layout.attention.opaque",
    "register_rule": "autosp.layout.registry",
    "shard_lm_head": "autosp.layers",
    "sharded_logits": "autosp.layers",
    "vocab_parallel_cross_entropy": "autosp.custom_ops.vocab_parallel",
    "vocab_parallel_entropy": "autosp.custom_ops.vocab_parallel",
    "vocab_parallel_jsd": "autosp.custom_ops.vocab_parallel",
    "vocab_parallel_kl_div": "autosp.custom_ops.vocab_parallel",
    "vocab_parallel_linear_cross_entropy": "autosp.custom_ops.linear_loss",
    "vocab_parallel_linear_entropy": "autosp.custom_ops.linear_loss",
    "vocab_parallel_linear_jsd": "autosp.custom_ops.linear_loss",
    "vocab_parallel_linear_kl_div": "autosp.custom_ops.linear_loss",
    "vocab_parallel_linear_logprobs": "autosp.custom_ops.linear_loss",
    "vocab_parallel_linear_token_stats": "autosp.custom_ops.linear_loss",
    "vocab_parallel_logprobs": "autosp.custom_ops.vocab_parallel",
    "vocab_parallel_token_stats": "autosp.custom_ops.vocab_parallel",
    "vocab_parallel_topk_kl_div": "autosp.custom_ops.vocab_parallel",
}

__all__ = [
    "AutoSPConfig",
    "AutoSPError",
    "CheckResult",
    "ConfigError",
    "InputError",
    "InternalError",
    "LinearTokenStats",
    "RankMismatchError",
    "Refusal",
    "Strategy",
    "TokenStats",
    "UnsupportedGraphError",
    "VocabParallelCausalLMLoss",
    "VocabParallelCrossEntropyLoss",
    "VocabParallelEmbedding",
    "VocabParallelLinear",
    "clip_grad_norm_",
    "dense_state_dict",
    "check",
    "initialize",
    "prepare_autosp_inputs",
    "prepare_batch",
    "register_attention",
    "register_rule",
    "shard_lm_head",
    "sharded_logits",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_jsd",
    "vocab_parallel_kl_div",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_entropy",
    "vocab_parallel_linear_jsd",
    "vocab_parallel_linear_kl_div",
    "vocab_parallel_linear_logprobs",
    "vocab_parallel_linear_token_stats",
    "vocab_parallel_logprobs",
    "vocab_parallel_token_stats",
    "vocab_parallel_topk_kl_div",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autosp' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
