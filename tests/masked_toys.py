"""A toy whose attention has a mask of any kind, in the forms in which models write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import toys
from torch import nn
from torch.nn import functional as F

Mask = Callable[["MaskedToy", torch.Tensor, torch.Tensor], torch.Tensor | None]
MASKS: dict[str, Mask] = {}


def _mask(function: Mask) -> Mask:
    MASKS[function.__name__] = function
    return function


def _places(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(ids.shape[1], device=ids.device)
    return places[:, None], places[None, :]


@_mask
def none(toy, ids, positions):
    return None


@_mask
def causal(toy, ids, positions):
    q, k = _places(ids)
    return k <= q


@_mask
def window(toy, ids, positions):
    q, k = _places(ids)
    return (k <= q) & (k > q - 5)


@_mask
def document(toy, ids, positions):
    q, k = _places(ids)
    number = (positions == 0).cumsum(-1)
    return (k <= q) & (number[:, None, :, None] == number[:, None, None, :])


@_mask
def padding(toy, ids, positions):
    q, k = _places(ids)
    return (k <= q) & (ids > 3)[:, None, None, :]


@_mask
def chunked(toy, ids, positions):
    q, k = _places(ids)
    return (k <= q) & (q // 6 == k // 6)


@_mask
def learned_alibi(toy, ids, positions):
    q, k = _places(ids)
    return (-toy.slopes.view(1, -1, 1, 1) * (q - k)).masked_fill(k > q, float("-inf"))


@_mask
def square_bias(toy, ids, positions):
    """A bias that is no function of queries and keys alone: its tensor is made."""
    q, k = _places(ids)
    return toy.table((q - k).clamp(0, 7)).permute(2, 0, 1).masked_fill(k > q, float("-inf"))


def left_padding(toy, ids, positions):
    """Queries before the first key that may be seen see nothing: the operator gives zeros, written out it is NaN."""
    q, k = _places(ids)
    return (k <= q) & (k > 2)


class MaskedToy(nn.Module):
    """``toys.Toy`` with a mask of ``MASKS`` or ``left_padding``; "is_causal" leaves it to the operator. Values have a
    size of their own. ``dropout`` is that of the operator's probabilities.

    ``form`` is "sdpa" or "eager": scores, softmax and mixing written out, over repeated key/value heads.
    """

    def __init__(
        self,
        mask: str,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 4,
        value_size: int = 4,
        form: str = "sdpa",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.form, self.dropout = form, dropout
        self.toy = toys.build(heads=heads, kv_heads=kv_heads, size=size)
        self.mask, self.value_size = mask, value_size
        torch.manual_seed(5)
        self.v = nn.Linear(16, kv_heads * value_size)
        self.o = nn.Linear(heads * value_size, 16)
        self.slopes = nn.Parameter(torch.rand(heads))
        self.table = nn.Embedding(8, heads)
        used = {"learned_alibi": self.slopes, "square_bias": self.table.weight}
        for name, parameter in used.items():
            parameter.requires_grad_(name == mask)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> toys.Out:
        toy, attention = self.toy, self.toy.attention
        rows, length = input_ids.shape
        x = toy.embed(input_ids)
        q = attention.q(x).view(rows, length, attention.heads, attention.size).transpose(1, 2)
        k = attention.k(x).view(rows, length, attention.kv_heads, attention.size).transpose(1, 2)
        v = self.v(x).view(rows, length, attention.kv_heads, self.value_size).transpose(1, 2)
        is_causal = self.mask == "is_causal"
        masks = {**MASKS, "left_padding": left_padding}
        mask = None if is_causal else masks[self.mask](self, input_ids, position_ids)
        if self.form == "eager":
            return self.finish(x, self.written_out(q, k, v, mask, is_causal), labels)
        grouped = attention.heads != attention.kv_heads
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout, is_causal=is_causal, enable_gqa=grouped
        )
        return self.finish(x, out, labels)

    def written_out(self, q, k, v, mask, is_causal: bool) -> torch.Tensor:
        """``softmax(q k^T) v`` as models of the eager form write it."""
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if is_causal:
            places = torch.arange(q.shape[2], device=q.device)
            mask = places[None, :] <= places[:, None]
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return torch.softmax(scores, dim=-1) @ v

    def finish(self, x: torch.Tensor, out: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        toy = self.toy
        x = x + self.o(out.transpose(1, 2).flatten(2))
        logits = toy.head(toy.norm(x))
        return toys.Out(toys.pad_slice(toy, logits, labels), logits)


def build(mask: str, **settings: Any) -> MaskedToy:
    """A toy with the same weights in every process."""
    model = MaskedToy(mask, **settings)
    for name in ("v", "positions", "mlp"):
        module = getattr(model.toy.attention if name == "v" else model.toy, name)
        module.requires_grad_(False)
    model.toy.attention.o.requires_grad_(False)
    return model.double()


def batch(length: int, *, rows: int = 2, packed: bool = False) -> dict[str, torch.Tensor]:
    """Ids, labels and, where documents matter, positions that start anew within the sequence."""
    made = toys.batch(length, rows=rows)
    if packed:
        first = min(7, length)
        positions = torch.cat([torch.arange(first), torch.arange(length - first)])
        made["position_ids"] = positions.expand(rows, length).contiguous()
    return made
