"""Masks, windows, biases and attention that is written out: exact on every mesh."""

from __future__ import annotations

import functools
import math

import parity
import pytest
import torch
import toys
import zoo
from pool import RankInfo, RankPool
from torch import nn
from torch.nn import functional as F

import autosp


def check_all(everyone: list[list[parity.Result]], rtol: float = 1e-5) -> None:
    for results in everyone:
        for result in results:
            result.check(rtol)


def padding(kind: str, rows: int, length: int) -> torch.Tensor:
    mask = torch.ones(rows, length, dtype=torch.long)
    if kind == "right":
        mask[0, -5:] = 0
    elif kind == "left":
        mask[0, :5] = 0
    return mask


def square(kind: str, rows: int, heads: int, length: int) -> torch.Tensor:
    """Causal masks of the forms that models hand to attention."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    if kind == "bool_4d":
        mask = causal.expand(rows, 1, length, length).clone()
        mask[0, :, :, 1:3] &= torch.eye(length, dtype=torch.bool)[:, 1:3]
        return mask
    if kind == "bool_that_hides_rows":
        return causal.expand(rows, 1, length, length) & (torch.arange(length) > 2)
    generator = torch.Generator().manual_seed(3)
    bias = torch.zeros(length, length).masked_fill(~causal, torch.finfo(torch.float32).min)
    if kind == "float_shared":
        return (bias + torch.randn(length, length, generator=generator)).view(1, 1, length, length)
    if kind == "float_per_head":
        return bias + torch.randn(rows, heads, length, length, generator=generator)
    if kind == "float_keys_only":
        return torch.randn(rows, 1, 1, length, generator=generator)
    return bias + torch.randn(heads, length, length, generator=generator)


@pytest.mark.parametrize(
    "kind",
    parity.mostly_slow(
        ["bool_4d", "bool_that_hides_rows", "float_shared", "float_per_head", "float_keys_only", "float_3d"],
        ["bool_4d", "float_3d"],
    ),
)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_square_masks(ranks: RankPool, kind: str, world: int):
    batches = [{**toys.batch(n), "attention_mask": square(kind, 2, 4, n)} for n in (16, 17)]
    check_all(ranks.run(parity.run_model, toys.build, batches, world_size=world))


def test_padding_masks_of_llama(ranks: RankPool):
    batches = []
    for length in (16, 17):
        for kind in ("ones", "right", "left"):
            mask = padding(kind, 2, length)
            batch = zoo.batch(length)
            batches.append({**batch, "labels": batch["labels"].masked_fill(mask == 0, -100), "attention_mask": mask})
    build = functools.partial(zoo.build, "llama", num_hidden_layers=1)
    check_all(ranks.run(parity.run_model, build, batches, timeout=300))


@pytest.mark.parametrize("kind", ["right", "left"])
@pytest.mark.parametrize("name", ["opt", "bert", "gpt2"])
@pytest.mark.slow
def test_padding_masks_of_other_models(ranks: RankPool, name: str, kind: str):
    count = "n_layer" if name == "gpt2" else "num_hidden_layers"
    build = functools.partial(zoo.build, name, **{count: 1})
    batches = []
    for length in (16, 17):
        mask = padding(kind, 2, length)
        batch = zoo.batch(length)
        batches.append({**batch, "labels": batch["labels"].masked_fill(mask == 0, -100), "attention_mask": mask})
    check_all(ranks.run(parity.run_model, build, batches, timeout=300))


@pytest.mark.parametrize("window", parity.mostly_slow([4, 64], [4]))
def test_sliding_window(ranks: RankPool, window: int):
    build = functools.partial(zoo.build, "mistral", num_hidden_layers=1, sliding_window=window)
    check_all(ranks.run(parity.run_model, build, [zoo.batch(17)], timeout=240))


@pytest.mark.parametrize("kind", parity.mostly_slow(["table", "slopes"], ["slopes"]))
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_learned_bias(ranks: RankPool, kind: str, world: int):
    build = functools.partial(toys.LearnedBias, kind)
    check_all(ranks.run(parity.run_model, build, [toys.batch(16), toys.batch(17)], world_size=world))


class WrittenOut(nn.Module):
    """``softmax(QK^T)V`` written out, with a soft cap and attention sinks."""

    def __init__(self, sinks: bool) -> None:
        super().__init__()
        self.toy = toys.build(heads=4, kv_heads=4)
        torch.manual_seed(3)
        self.sinks = nn.Parameter(torch.randn(4)) if sinks else None

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        toy = self.toy
        rows, length = input_ids.shape
        x = toy.embed(input_ids) + toy.positions(torch.arange(length))
        q, k, v = (
            layer(x).view(rows, length, 4, 4).transpose(1, 2)
            for layer in (toy.attention.q, toy.attention.k, toy.attention.v)
        )
        scores = torch.tanh(q @ k.transpose(-1, -2) / 2.0) * 5.0
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.view(1, 4, 1, 1).expand(rows, 4, length, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
        x = x + toy.attention.o((weights @ v).transpose(1, 2).reshape(rows, length, 16))
        logits = toy.head(toy.norm(x))
        return toys.Out(toys.pad_slice(toy, logits, labels), logits)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_attention_written_out(ranks: RankPool, world: int, sinks: bool):
    build = functools.partial(WrittenOut, sinks)
    check_all(ranks.run(parity.run_model, build, [toys.batch(16), toys.batch(17)], world_size=world))


class DropsProbabilities(nn.Module):
    """Attention to all tokens alike, of values that tell the tokens apart: what it gives is its probabilities."""

    def __init__(self, form: str, length: int) -> None:
        super().__init__()
        self.form, self.length = form, length
        self.embed = nn.Embedding.from_pretrained(torch.eye(length), freeze=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        v = self.embed(input_ids).unsqueeze(1).expand(-1, 5, -1, -1)
        q = k = v * 0
        if self.form == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
        else:
            out = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.25) @ v
        return out.transpose(1, 2)


def dropped(rank_info: RankInfo, form: str) -> list[torch.Tensor]:
    autosp.initialize(parity.CASE)
    length = 17
    compiled = torch.compile(DropsProbabilities(form, length), backend="autosp")
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(compiled(**autosp.prepare_batch({"input_ids": torch.arange(length).expand(2, length)})))
    return [output.full_tensor().detach() for output in outputs]


@pytest.mark.parametrize("form", ["sdpa", "written out"])
def test_heads_of_different_ranks_drop_other_probabilities(ranks: RankPool, form: str):
    everyone = ranks.run(dropped, form, world_size=3)
    for outputs in zip(*everyone, strict=True):
        assert all(torch.equal(outputs[0], output) for output in outputs), "all ranks see one and the same output"
    first, again, other = everyone[0]
    assert torch.equal(first, again) and not torch.equal(first, other)
    rows = [row for batch in first.transpose(1, 2).unbind() for row in batch.unbind()]
    assert len(rows) == 10
    for index, row in enumerate(rows):
        assert not any(torch.equal(row, earlier) for earlier in rows[:index]), "heads and rows of the batch drop alike"
    assert first.unique().tolist() == [0.0, pytest.approx(1 / 17 / 0.75)]
    assert (first == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)


class CloseScores(nn.Module):
    """Scores of 256 and 257 under dropout that drops nothing; bfloat16 has no number between 256 and 258."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.tensor([[16.0, 0.0], [16.0, 1.0]]))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids).unsqueeze(1).expand(-1, 3, -1, -1)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=1e-8, scale=1.0).transpose(1, 2)


def close_scores(rank_info: RankInfo, ids: torch.Tensor) -> list[torch.Tensor]:
    autosp.initialize(parity.CASE)
    found = []
    for half in (True, False):
        compiled = torch.compile(CloseScores().to(torch.bfloat16 if half else torch.float), backend="autosp")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not half):
            found.append(compiled(**autosp.prepare_batch({"input_ids": ids})).full_tensor())
    return found


def test_scores_under_dropout_are_in_single_precision(ranks: RankPool):
    """With bf16 weights and under autocast, as in the operator."""
    ids = torch.arange(17).remainder(2).expand(2, 17)
    ones = 8 * math.e
    expected = torch.where(ids == 1, ones / (ones + 9), 8 / 17)
    for outputs in ranks.run(close_scores, ids):
        for output in outputs:
            assert output.dtype == torch.bfloat16
            torch.testing.assert_close(output[..., 1].float(), expected[..., None].expand(2, 17, 3), rtol=1e-2, atol=0)


class TalkingHeads(nn.Module):
    """Attention written out with a layer over the heads before the softmax and after it, as layer or as product."""

    def __init__(self, kind: str, heads: int) -> None:
        super().__init__()
        self.toy = toys.build(heads=heads, kv_heads=heads)
        torch.manual_seed(3)
        self.before, self.after = nn.Linear(heads, heads, bias=False), nn.Linear(heads, heads)
        self.kind, self.heads = kind, heads

    def mix(self, layer: nn.Linear, scores: torch.Tensor) -> torch.Tensor:
        if self.kind == "einsum":
            return torch.einsum("bhqk,gh->bgqk", scores, layer.weight)
        if self.kind == "flat":
            rows, heads, length, keys = scores.shape
            flat = scores.permute(1, 0, 2, 3).reshape(heads, rows * length * keys)
            return (layer.weight @ flat).view(heads, rows, length, keys).transpose(0, 1)
        return layer(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        toy, layers = self.toy, self.toy.attention
        rows, length = input_ids.shape
        x = toy.embed(input_ids)
        q, k, v = (f(x).view(rows, length, self.heads, 4).transpose(1, 2) for f in (layers.q, layers.k, layers.v))
        scores = self.mix(self.before, q @ k.transpose(-1, -2) / 2.0)
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        weights = self.mix(self.after, scores.softmax(-1))
        x = x + layers.o((weights @ v).transpose(1, 2).reshape(rows, length, -1))
        logits = toy.head(toy.norm(x))
        return toys.Out(toys.pad_slice(toy, logits, labels), logits)


@pytest.mark.parametrize(
    ("kind", "heads", "world"),
    [
        ("layer", 4, 3),
        *(
            pytest.param(kind, heads, world, marks=pytest.mark.slow)
            for kind in ("layer", "einsum", "flat")
            for heads, world in ((4, 2), (3, 4), (6, 3))
        ),
    ],
)
def test_a_layer_over_heads_inside_attention(ranks: RankPool, kind: str, heads: int, world: int):
    """Queries times keys are one size, and with open numbers of rows it is a product of three."""
    build = functools.partial(TalkingHeads, kind, heads)
    batches = [toys.batch(17)]
    if (heads, world) == (6, 3):
        batches += [toys.batch(17, rows=3), toys.batch(18)]
    check_all(ranks.run(parity.run_model, build, batches, world_size=world, timeout=300))
