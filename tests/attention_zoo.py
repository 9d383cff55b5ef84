"""Tiny transformers models whose attention or positions are out of the ordinary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zoo

_BASE = {**zoo._GQA, "num_hidden_layers": 1}


def smollm2(**changes: Any) -> torch.nn.Module:
    """The heads of SmolLM2-135M: 9 query and 3 key/value heads, tied embeddings."""
    heads = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    return zoo._make("LlamaForCausalLM", "LlamaConfig", **{**_BASE, **heads, **changes})


def deepseek_v3(**changes: Any) -> torch.nn.Module:
    """Multi-head latent attention: queries and keys of another size than values."""
    settings = {
        **_BASE, "num_key_value_heads": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    return zoo._make("DeepseekV3ForCausalLM", "DeepseekV3Config", **{**settings, **changes})


def gpt_oss(**changes: Any) -> torch.nn.Module:
    """Attention sinks, alternating windows, attention written out."""
    settings = {**_BASE, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4,
                "num_experts_per_tok": 2}  # fmt: skip
    model = zoo._make("GptOssForCausalLM", "GptOssConfig", **{**settings, **changes})
    model.set_experts_implementation("batched_mm")
    model.set_attn_implementation("eager")
    return model


def bloom(**changes: Any) -> torch.nn.Module:
    """ALiBi."""
    settings = {"hidden_size": 64, "n_layer": 1, "n_head": 8, "vocab_size": zoo.VOCAB, "hidden_dropout": 0.0,
                "attention_dropout": 0.0}  # fmt: skip
    return zoo._make("BloomForCausalLM", "BloomConfig", **{**settings, **changes})


def t5(**changes: Any) -> torch.nn.Module:
    """A learned bias by relative position, an encoder, cross-attention."""
    settings = {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 1, "num_heads": 8, "vocab_size": zoo.VOCAB,
                "dropout_rate": 0.0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
                "relative_attention_max_distance": 20}  # fmt: skip
    return zoo._make("T5ForConditionalGeneration", "T5Config", **{**settings, **changes})


def gemma3(**changes: Any) -> torch.nn.Module:
    """Windows and whole attention in turn, two rotary bases."""
    settings = {**_BASE, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    return zoo._make("Gemma3ForCausalLM", "Gemma3TextConfig", **{**settings, **changes})


def llama4(**changes: Any) -> torch.nn.Module:
    """Chunked attention."""
    settings = {**_BASE, "head_dim": 8, "attention_chunk_size": 6, "layer_types": ["chunked_attention"],
                "no_rope_layers": [1], "num_local_experts": 2, "interleave_moe_layer_step": 2, "moe_layers": [],
                "intermediate_size_mlp": 96}  # fmt: skip
    return zoo._make("Llama4ForCausalLM", "Llama4TextConfig", **{**settings, **changes})


def phi3_longrope(**changes: Any) -> torch.nn.Module:
    """Rotary factors chosen by the largest position; a part of each head is rotated."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0], "rope_theta": 1e4,
               "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16}  # fmt: skip
    settings = {**_BASE, "pad_token_id": 0, "rope_parameters": scaling, "original_max_position_embeddings": 16,
                "max_position_embeddings": 64}  # fmt: skip
    return zoo._make("Phi3ForCausalLM", "Phi3Config", **{**settings, **changes})


def gpt_neox(**changes: Any) -> torch.nn.Module:
    """Partial rotary embedding, parallel residuals."""
    settings = {**zoo._SMALL, "num_hidden_layers": 1, "intermediate_size": 96, "hidden_dropout": 0.0,
                "attention_dropout": 0.0, "max_position_embeddings": 512}  # fmt: skip
    return zoo._make("GPTNeoXForCausalLM", "GPTNeoXConfig", **{**settings, **changes})


class _Text(torch.nn.Module):
    """The text model of Qwen2-VL with a head of its own: multimodal rope without pictures."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        self.model = zoo._make("Qwen2VLTextModel", "Qwen2VLTextConfig", **{**_BASE, "rope_parameters": rope, **changes})
        self.head = torch.nn.Linear(64, zoo.VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> Any:
        import toys

        hidden = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        logits = self.head(hidden)
        return toys.Out(toys.pad_slice(None, logits, labels), logits)


def qwen2_vl(**changes: Any) -> torch.nn.Module:
    return _Text(**changes)


def mamba(**changes: Any) -> torch.nn.Module:
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": zoo.VOCAB, "state_size": 4,
                "time_step_rank": 4, "use_mambapy": False}  # fmt: skip
    return zoo._make("MambaForCausalLM", "MambaConfig", **{**settings, **changes})


def qwen3_next(**changes: Any) -> torch.nn.Module:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
              "linear_value_head_dim": 8}  # fmt: skip
    settings = {**_BASE, **linear, "head_dim": 8, "num_hidden_layers": 2, "num_experts": 0, "mlp_only_layers": [0, 1],
                "num_experts_per_tok": 1, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
    return zoo._make("Qwen3NextForCausalLM", "Qwen3NextConfig", **{**settings, **changes})


def rwkv(**changes: Any) -> torch.nn.Module:
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": zoo.VOCAB, "attention_hidden_size": 32}
    return zoo._make("RwkvForCausalLM", "RwkvConfig", **{**settings, **changes})


MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    f.__name__: f
    for f in (smollm2, deepseek_v3, gpt_oss, bloom, t5, gemma3, llama4, phi3_longrope, gpt_neox, qwen2_vl, mamba,
              qwen3_next, rwkv)
}  # fmt: skip


def build(name: str, *, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """The model ``name`` with the same weights in every process, no bias zero."""
    return zoo.seeded(MODELS[name], seed, **changes)


def multimodal_positions(length: int) -> torch.Tensor:
    """``(3, B, S)``, not contiguous: a picture of 2 x 3 patches among text, its three coordinates apart."""
    time = torch.arange(length)
    height, width = time.clone(), time.clone()
    height[4:10] = 4 + torch.arange(6) // 3
    width[4:10] = 4 + torch.arange(6) % 3
    time[4:10] = 4
    return torch.stack([time, height, width], dim=-1).expand(2, length, 3).permute(2, 0, 1)
