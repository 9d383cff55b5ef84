"""Masks and biases as programs over tensors of their own, for the kernels of block attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosp.custom_ops.block_attention import BIAS, CAUSAL_BOUNDS, OPEN_BOUNDS, VISIBLE

BATCH, HEADS = 2, 2


@dataclass(frozen=True)
class Case:
    """A program, its tensors for ``(queries, keys)``, and what it does, written out.

    Args:
        program: its text.
        leaves: the tensors, from the numbers of queries and keys.
        dense: ``(scores, leaves, query positions [S, 1], key positions [S]) -> (scores, mask)`` over all of both.
        bounds: allowed ``query - key``.
    """

    program: str
    leaves: Callable[[int, int], list[Tensor]]
    dense: Callable[..., tuple[Tensor, Any]]
    bounds: tuple[int, int] = OPEN_BOUNDS


def text(steps: list[Any], **results: Any) -> str:
    return json.dumps({"steps": steps, **results})


def step(index: int) -> dict[str, int]:
    return {"step": index}


def leaf(index: int) -> dict[str, int]:
    return {"leaf": index}


SCORE, QUERY, KEY, HEAD = {"score": 0}, {"index": "query"}, {"index": "key"}, {"index": "head"}


def uniform(*shape: int, seed: int = 3) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def document(rows: int, keys: int) -> list[Tensor]:
    """Ids of both batch rows, documents of odd lengths."""
    places = torch.arange(max(rows, keys))
    ids = torch.stack([places // 11, (places + 3) // 17])
    return [ids[:, None, :rows, None], ids[:, None, None, :keys]]


def padding(rows: int, keys: int) -> list[Tensor]:
    seen = torch.ones(BATCH, 1, 1, keys, dtype=torch.bool)
    seen[0, ..., : keys // 3] = False
    seen[1, ..., keys - 2 :] = False
    return [seen]


def chunk(rows: int, keys: int) -> list[Tensor]:
    return [(torch.arange(rows) // 13)[:, None], (torch.arange(keys) // 13)[None, :]]


def prefix(rows: int, keys: int) -> list[Tensor]:
    return [torch.arange(keys)[None], torch.arange(rows)[:, None], (torch.arange(keys) < 5)[None]]


def slopes(rows: int, keys: int) -> list[Tensor]:
    return [uniform(HEADS, 1, 1), torch.arange(rows)[:, None], torch.arange(keys)[None]]


EQUAL = [["aten::eq.Tensor", [leaf(0), leaf(1)], {}]]
ALIBI = [
    ["aten::sub.Tensor", [leaf(2), leaf(1)], {}],
    ["aten::mul.Tensor", [leaf(0), step(0)], {}],
    ["aten::gt.Tensor", [leaf(2), leaf(1)], {}],
    ["aten::masked_fill.Scalar", [step(1), step(2), float("-inf")], {}],
    ["aten::add.Tensor", [SCORE, step(3)], {}],
]
SOFT_CAP = [
    ["aten::div.Scalar", [SCORE, 0.7], {}],
    ["aten::tanh", [step(0)], {}],
    ["aten::mul.Scalar", [step(1), 0.7], {}],
    ["aten::ge.Tensor", [QUERY, KEY], {}],
]
TABLE = [
    ["aten::sub.Tensor", [QUERY, KEY], {}],
    ["aten::clamp", [step(0), -2, 5], {}],
    ["aten::index.Tensor", [{"whole": 0}, [step(1), HEAD]], {}],
    ["aten::add.Tensor", [SCORE, step(2)], {}],
]
# Learned numbers a query, a key and a head, and a factor of the scores.
LEARNED = [
    ["aten::mul.Tensor", [SCORE, leaf(2)], {}],
    ["aten::add.Tensor", [leaf(0), leaf(1)], {}],
    ["aten::add.Tensor", [step(0), step(1)], {}],
    ["aten::exp", [leaf(1)], {}],
    ["aten::sub.Tensor", [step(2), step(3)], {}],
]
BLOCKS = [
    ["aten::floor_divide.Scalar", [QUERY, 16], {}],
    ["aten::floor_divide.Scalar", [KEY, 16], {}],
    ["aten::index.Tensor", [{"whole": 0}, [step(0), step(1)]], {}],
    ["aten::sub.Tensor", [KEY, QUERY], {}],
    ["aten::floor_divide.Scalar", [step(3), 3], {}],
    ["aten::remainder.Scalar", [QUERY, 5], {}],
    ["aten::ne.Scalar", [step(5), 2], {}],
    ["aten::bitwise_or.Tensor", [step(2), step(6)], {}],
    ["aten::le.Scalar", [step(4), -1], {}],
    ["aten::bitwise_and.Tensor", [step(7), step(8)], {}],
]


def listed(rows: int, keys: int) -> list[Tensor]:
    return [uniform(-(-rows // 16), -(-keys // 16)) > 0.4]


def blocks_shown(scores: Tensor, x: list[Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    distance = torch.div(k - q, 3, rounding_mode="floor")
    return scores, (x[0][q // 16, k // 16] | (q % 5 != 2)) & (distance <= -1)


def blind(rows: int, keys: int) -> list[Tensor]:
    mask = uniform(1, HEADS, rows, keys) > 0.5
    mask[:, :, min(4, rows - 1)] = False
    return [mask]


def capped(scores: Tensor, x: list[Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(scores / 0.7) * 0.7, q >= k


def learned(scores: Tensor, x: list[Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Any]:
    return scores * x[2] + (x[0] + x[1]) - torch.exp(x[1]), None


CASES: dict[str, Case] = {
    "nothing": Case("", lambda s, t: [], lambda s, x, q, k: (s, None)),
    "causal": Case("", lambda s, t: [], lambda s, x, q, k: (s, None), CAUSAL_BOUNDS),
    "window": Case("", lambda s, t: [], lambda s, x, q, k: (s, None), (0, 9)),
    "document": Case(text(EQUAL, mask=step(0)), document, lambda s, x, q, k: (s, x[0] == x[1]), CAUSAL_BOUNDS),
    "padding": Case(text([], mask=leaf(0)), padding, lambda s, x, q, k: (s, x[0]), CAUSAL_BOUNDS),
    "chunk": Case(text(EQUAL, mask=step(0)), chunk, lambda s, x, q, k: (s, x[0] == x[1]), CAUSAL_BOUNDS),
    "prefix": Case(
        text([["aten::le.Tensor", [leaf(0), leaf(1)], {}], ["aten::__or__.Tensor", [step(0), leaf(2)], {}]],
             mask=step(1)),
        prefix, lambda s, x, q, k: (s, (x[0] <= x[1]) | x[2]),
    ),
    "listed_blocks": Case(text(BLOCKS, mask=step(9)), listed, blocks_shown),
    "exact_mask": Case(VISIBLE, blind, lambda s, x, q, k: (s, x[0])),
    "exact_bias": Case(BIAS, lambda s, t: [uniform(BATCH, 1, s, t)], lambda s, x, q, k: (s + x[0], None), (0, 20)),
    "alibi": Case(
        text(ALIBI, score=step(4)), slopes,
        lambda s, x, q, k: (s + (x[0] * (x[2] - x[1])).masked_fill(x[2] > x[1], float("-inf")), None),
    ),
    "soft_cap": Case(text(SOFT_CAP, score=step(2), mask=step(3)), lambda s, t: [], capped),
    "table": Case(
        text(TABLE, score=step(3)), lambda s, t: [uniform(8, HEADS)],
        lambda s, x, q, k: (s + x[0][(q - k).clamp(-2, 5)].permute(2, 0, 1), None),
    ),
    "learned": Case(
        text(LEARNED, score=step(4)),
        lambda s, t: [uniform(BATCH, HEADS, s, 1), uniform(1, HEADS, 1, t, seed=4), uniform(HEADS, 1, 1, seed=5)],
        learned,
    ),
}  # fmt: skip


def reference(case: Case, q: Tensor, k: Tensor, v: Tensor, leaves: list[Tensor], scale: float) -> Tensor:
    """Attention written out in the dtype of its operands; rows that see nothing are zeros."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    rows, keys = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
    scores, mask = case.dense(scores, leaves, rows, keys)
    distance = rows - keys
    shown = (distance >= case.bounds[0]) & (distance <= case.bounds[1])
    shown = shown if mask is None else shown & mask
    scores = scores.masked_fill(~shown, float("-inf"))
    blind_rows = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind_rows, 0.0), -1).masked_fill(blind_rows, 0.0)
    return weights @ v.repeat_interleave(group, 1)
