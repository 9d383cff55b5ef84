"""What a training step has to compute, whoever computes it: the numerator of model flops utilisation (MFU)."""

from __future__ import annotations

from typing import Any

from torch import nn


def model_flops(model: Any, length: int) -> int:
    """Floating-point operations of forward and backward of one causal sequence, each counted once.

    ``6 N T + 6 L H D T^2`` for T tokens: N parameters that are multiplied with each token, L layers, H query heads of
    D elements. A product of a token with N weights takes 2 N operations, twice that in the backward; attention has two
    such products of ``T x D`` with ``D x T``, of which a causal mask leaves half, and twice that in the backward. It is
    the count of PaLM (Chowdhery et al. 2022, appendix B) with the mask's half taken off: recomputation under
    checkpointing is not counted, nor norms, rotations and softmax, nor the lookup in an embedding that is not the head.

    Args:
        model: a decoder of transformers whose layers all attend to the whole sequence.
        length: tokens of the sequence.
    """
    config = model.config
    weights = {id(parameter): parameter.numel() for parameter in model.parameters() if parameter.dim() >= 2}
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and (head is None or module.weight is not head.weight):
            weights.pop(id(module.weight), None)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * size * length**2
    return 6 * sum(weights.values()) * length + 6 * attention
