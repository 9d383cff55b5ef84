"""Hand-written models that compile in a second, and the ways in which models write a causal loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

VOCAB = 48


class Out(NamedTuple):
    """What a toy returns."""

    loss: torch.Tensor
    logits: torch.Tensor


class Attention(nn.Module):
    """Causal attention over ``[batch, sequence, width]``, grouped when there are fewer key/value heads."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size, self.dropout = heads, kv_heads, size, dropout
        self.q = nn.Linear(width, heads * size)
        self.k = nn.Linear(width, kv_heads * size)
        self.v = nn.Linear(width, kv_heads * size)
        self.o = nn.Linear(heads * size, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(rows, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(x).view(rows, length, self.kv_heads, self.size).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.o(out.transpose(1, 2).reshape(rows, length, self.heads * self.size))


class Toy(nn.Module):
    """Embedding, positions made in the model, one attention layer, one MLP, a head, and one of ``LOSSES``."""

    def __init__(
        self,
        loss: str = "pad_slice",
        *,
        width: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 4,
        vocab: int = VOCAB,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(512, width)
        self.attention = Attention(width, heads, kv_heads, size, dropout)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("class_weights", torch.rand(vocab, generator=torch.Generator().manual_seed(7)) + 0.5)
        self.loss = LOSSES[loss]

    def hidden(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        x = x + self.positions(position_ids)
        x = x + self.attention(self.norm(x), mask)
        return x + self.mlp(self.norm(x))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **more: Any,
    ) -> Out:
        logits = self.head(self.hidden(input_ids, inputs_embeds, position_ids, attention_mask))
        return Out(self.loss(self, logits, labels, **more), logits)


Loss = Callable[..., torch.Tensor]
LOSSES: dict[str, Loss] = {}


def _loss(function: Loss) -> Loss:
    LOSSES[function.__name__] = function
    return function


def _flat(logits: torch.Tensor, labels: torch.Tensor, **settings: Any) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return F.pad(labels, (0, 1), value=-100)[..., 1:]


@_loss
def pad_slice(model, logits, labels):
    return _flat(logits, shifted(labels))


@_loss
def two_slices(model, logits, labels):
    return _flat(logits[:, :-1], labels[:, 1:])


@_loss
def two_slices_contiguous(model, logits, labels):
    return _flat(logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous())


@_loss
def two_slices_channels_second(model, logits, labels):
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])


@_loss
def roll(model, logits, labels):
    last = torch.arange(labels.shape[1], device=labels.device) == labels.shape[1] - 1
    return _flat(logits, torch.roll(labels, -1, 1).masked_fill(last, -100))


@_loss
def cat(model, logits, labels):
    return _flat(logits, torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), -100)], dim=1))


@_loss
def flat_slice(model, logits, labels):
    """One row only: the flattened sequence is sliced."""
    return F.cross_entropy(logits[0][:-1], labels[0][1:])


@_loss
def unshifted(model, logits, labels):
    return _flat(logits, labels)


@_loss
def reduction_sum(model, logits, labels):
    return _flat(logits, shifted(labels), reduction="sum")


@_loss
def reduction_none(model, logits, labels, weights):
    losses = _flat(logits[:, :-1], labels[:, 1:], reduction="none")
    weights = weights[:, 1:].reshape(-1)
    return (losses * weights).sum() / weights.sum()


@_loss
def reduction_none_by_row(model, logits, labels):
    losses = _flat(logits, shifted(labels), reduction="none").view(labels.shape)
    return (losses.sum(1) / (shifted(labels) != -100).sum(1).clamp(min=1)).mean()


@_loss
def gathered_log_softmax(model, logits, labels):
    logp = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    target = labels[:, 1:]
    picked = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    keep = target != -100
    return -(picked * keep).sum() / keep.sum()


@_loss
def boolean_sum(model, logits, labels):
    """Per-token losses times a boolean mask, averaged by the count of valid tokens."""
    losses = _flat(logits, shifted(labels), reduction="none")
    keep = (shifted(labels) != -100).reshape(-1)
    return torch.where(keep, losses, 0.0).sum() / keep.sum()


@_loss
def label_smoothing(model, logits, labels):
    return _flat(logits, shifted(labels), label_smoothing=0.1)


@_loss
def class_weights(model, logits, labels):
    return _flat(logits, shifted(labels), weight=model.class_weights)


@_loss
def smoothed_class_weights(model, logits, labels):
    return _flat(logits, shifted(labels), weight=model.class_weights, label_smoothing=0.2)


@_loss
def smoothed_sum(model, logits, labels):
    return _flat(logits, shifted(labels), label_smoothing=0.2, reduction="sum")


@_loss
def legacy_size_average(model, logits, labels):
    return _flat(logits, shifted(labels), size_average=False)


@_loss
def legacy_reduce(model, logits, labels):
    return _flat(logits, shifted(labels), reduce=False).sum() / 7


@_loss
def keywords(model, logits, labels):
    target = shifted(labels).reshape(-1)
    return F.cross_entropy(target=target, input=logits.reshape(-1, logits.shape[-1]), ignore_index=-100)


@_loss
def other_ignore_index(model, logits, labels):
    return _flat(logits, torch.where(shifted(labels) < 0, 5, shifted(labels)), ignore_index=5)


@_loss
def module_loss(model, logits, labels):
    return nn.CrossEntropyLoss(reduction="mean")(logits.reshape(-1, logits.shape[-1]), shifted(labels).reshape(-1))


@_loss
def nll_of_log_softmax(model, logits, labels):
    logp = F.log_softmax(logits, dim=-1)
    return F.nll_loss(logp.reshape(-1, logp.shape[-1]), shifted(labels).reshape(-1))


@_loss
def several(model, logits, labels):
    z = torch.logsumexp(logits, dim=-1)
    return _flat(logits, shifted(labels)) + 0.5 * _flat(logits, labels, reduction="sum") / 9 + 1e-3 * (z**2).mean()


@_loss
def times_three(model, logits, labels):
    return 3 * pad_slice(model, logits, labels)


@_loss
def soft_targets(model, logits, labels, teacher):
    return _flat_soft(logits, teacher)


@_loss
def soft_targets_sum(model, logits, labels, teacher):
    return _flat_soft(logits, teacher, reduction="sum", label_smoothing=0.1)


@_loss
def soft_targets_weighted(model, logits, labels, teacher):
    return _flat_soft(logits, teacher, weight=model.class_weights)


def _flat_soft(logits, teacher, **settings):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), teacher.reshape(-1, logits.shape[-1]), **settings)


@_loss
def distilled(model, logits, labels, teacher):
    return F.kl_div(F.log_softmax(logits, -1), teacher, reduction="batchmean")


@_loss
def squared_error(model, logits, labels, teacher):
    return F.mse_loss(logits, teacher) + F.smooth_l1_loss(logits[:, :-1], teacher[:, 1:])


@_loss
def bce(model, logits, labels):
    target = (labels > VOCAB // 2).float()
    return F.binary_cross_entropy_with_logits(logits[..., 0], target, pos_weight=torch.tensor(2.0))


@_loss
def normalised_by_items(model, logits, labels, num_items):
    return _flat(logits, shifted(labels), reduction="sum") / num_items


@_loss
def none(model, logits, labels):
    return logits.float().pow(2).mean()


def build(loss: str = "pad_slice", *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Toy:
    """A toy with the same weights in every process."""
    torch.manual_seed(seed)
    return Toy(loss, **settings).to(dtype)


def batch(length: int, *, rows: int = 2, seed: int = 0, vocab: int = VOCAB, ignored: float = 0.3) -> dict[str, Any]:
    """Ids and labels; a part of the labels is ignored."""
    generator = torch.Generator().manual_seed(seed + 1000)
    ids = torch.randint(1, vocab, (rows, length), generator=generator)
    hidden = torch.rand(rows, length, generator=generator) < ignored
    return {"input_ids": ids, "labels": torch.where(hidden, -100, ids)}


def teacher(length: int, *, rows: int = 2, vocab: int = VOCAB) -> torch.Tensor:
    """Probabilities over the vocabulary for each token."""
    generator = torch.Generator().manual_seed(5)
    return torch.softmax(torch.randn(rows, length, vocab, generator=generator), dim=-1)


class LearnedBias(nn.Module):
    """Attention biases that are parameters: T5's table by distance, one number a head, ALiBi's slopes; a tied head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.toy = build(tied=True)
        # One number on all keys of a query changes nothing under softmax: this gradient is zero, and whatever is
        # computed for it is rounding, which differs between exact ways to attend: slopes attend block by block.
        self.toy.attention.k.bias.requires_grad_(kind != "slopes")
        self.kind = kind
        torch.manual_seed(9)
        self.table = nn.Embedding(8, 4)
        self.slopes = nn.Parameter(torch.rand(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Out:
        places = torch.arange(input_ids.shape[1])
        distance = places[:, None] - places[None, :]
        if self.kind == "table":
            bias = self.table(distance.clamp(0, 7)).permute(2, 0, 1).unsqueeze(0)
        else:
            bias = -self.slopes.view(1, 4, 1, 1) * distance.abs()
        bias = bias.masked_fill(distance < 0, float("-inf"))
        return self.toy(input_ids, labels, attention_mask=bias)
