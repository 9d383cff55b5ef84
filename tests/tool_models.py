"""Small models for the commands: ``tool_models:factory`` is what a user would write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autosp

VOCAB = 32


@torch.library.custom_op("tool_models::wrongly_ruled", mutates_args=())
def wrongly_ruled(x: Tensor) -> Tensor:
    """Subtract the mean over tokens: each token depends on all."""
    return x - x.mean(dim=1, keepdim=True)


@wrongly_ruled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


wrongly_ruled.register_autograd(lambda ctx, grad: grad - grad.mean(dim=1, keepdim=True))


def register_wrong_rule() -> None:
    """Claim that ``wrongly_ruled`` treats each token alone, which is not so: what a check must find."""

    @autosp.register_rule(torch.ops.tool_models.wrongly_ruled.default)
    def rule(call: Any) -> Any:
        return autosp.Strategy(inputs={"x": call["x"].placement}, output=call["x"].placement)


class Small(nn.Module):
    """Embedding, an operator of choice over tokens, a head and its loss."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCAB)
        self.register_buffer("calls", torch.zeros(()))
        self.between = between

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.between(self.mix(self.embed(input_ids)))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(length: int) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (2, length))
    return {"input_ids": ids, "labels": ids.clone()}


class WithLoss(nn.Module):
    """As transformers gives it: an object with ``loss`` and ``logits``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Tensor) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(**self.inner(**inputs))


def good() -> Any:
    torch.manual_seed(0)
    return WithLoss(Small()), batch


def refused() -> Any:
    torch.manual_seed(0)
    return WithLoss(Small(lambda x: x.cumsum(dim=1))), batch


def wrong() -> Any:
    torch.manual_seed(0)
    register_wrong_rule()
    return WithLoss(Small(torch.ops.tool_models.wrongly_ruled)), batch


def failing() -> Any:
    raise KeyError("a mistake of the user's")


def failing_batches() -> Any:
    return WithLoss(Small()), lambda length: batch(length)["nothing"]


def no_batches() -> Any:
    return WithLoss(Small()), lambda length: [length]


def no_model() -> Any:
    return "a string"


NOT_CALLABLE = 3
