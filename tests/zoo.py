"""Tiny configurations of unmodified transformers models, and the batches that they train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCAB = 128
_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": VOCAB}
_GQA = {**_SMALL, "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512}


def _make(model: str, config: str, **settings: Any) -> torch.nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def llama(**changes: Any) -> torch.nn.Module:
    return _make("LlamaForCausalLM", "LlamaConfig", **{**_GQA, **changes})


def qwen2(**changes: Any) -> torch.nn.Module:
    return _make("Qwen2ForCausalLM", "Qwen2Config", **{**_GQA, **changes})


def qwen3(**changes: Any) -> torch.nn.Module:
    return _make("Qwen3ForCausalLM", "Qwen3Config", **{**_GQA, "head_dim": 8, **changes})


def mistral(**changes: Any) -> torch.nn.Module:
    return _make("MistralForCausalLM", "MistralConfig", **{**_GQA, "sliding_window": 8, **changes})


def phi3(**changes: Any) -> torch.nn.Module:
    return _make("Phi3ForCausalLM", "Phi3Config", **{**_GQA, "pad_token_id": 0, **changes})


def gemma2(**changes: Any) -> torch.nn.Module:
    return _make("Gemma2ForCausalLM", "Gemma2Config", **{**_GQA, "head_dim": 8, "sliding_window": 8, **changes})


def gpt2(**changes: Any) -> torch.nn.Module:
    settings = {"n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": VOCAB, "n_positions": 512}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _make("GPT2LMHeadModel", "GPT2Config", **{**settings, **no_dropout, **changes})


def opt(**changes: Any) -> torch.nn.Module:
    settings = {**_SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 512}
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0}
    return _make("OPTForCausalLM", "OPTConfig", **{**settings, **no_dropout, **changes})


def mixtral(**changes: Any) -> torch.nn.Module:
    settings = {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = _make("MixtralForCausalLM", "MixtralConfig", **{**settings, **changes})
    # The default grouped kernel does not compile on the CPU, with or without autosp.
    model.set_experts_implementation("batched_mm")
    return model


def bert(**changes: Any) -> torch.nn.Module:
    settings = {**_SMALL, "intermediate_size": 96, "max_position_embeddings": 512}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _make("BertForMaskedLM", "BertConfig", **{**settings, **no_dropout, **changes})


MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    f.__name__: f for f in (llama, qwen2, qwen3, mistral, phi3, gemma2, gpt2, opt, mixtral, bert)
}


def build(name: str, *, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """The model ``name`` with the same weights in every process."""
    return seeded(MODELS[name], seed, **changes)


def seeded(make: Callable[..., torch.nn.Module], seed: int = 0, **changes: Any) -> torch.nn.Module:
    """What ``make`` gives with the same weights in every process, no bias zero."""
    torch.manual_seed(seed)
    model = make(**changes)
    # Zero-initialised biases would hide a wrong gradient of what they meet.
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def batch(length: int, *, rows: int = 2, seed: int = 0, labels: str = "all", **more: Any) -> dict[str, torch.Tensor]:
    """Token ids and labels of ``rows`` sequences of ``length`` tokens; ``labels`` names a pattern of ignored tokens."""
    generator = torch.Generator().manual_seed(seed + 100)
    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    target = ids.clone()
    if labels == "first_half":
        target[:, : length // 2] = -100
    elif labels == "one":
        target[:] = -100
        target[0, length - 1] = ids[0, length - 1]
    elif labels == "none_valid":
        target[:] = -100
    elif labels == "uneven":
        target[0, 3:] = -100
        target[1:, 13:] = -100
    elif labels == "first_valid":
        target[:, 1 : max(2, length // 3)] = -100
    return {"input_ids": ids, "labels": target, **more}
