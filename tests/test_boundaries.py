"""What crosses the borders of a graph: graph breaks, activation checkpointing, returned values, no sequence input."""

from __future__ import annotations

import collections
from typing import Any

import parity
import pytest
import torch
import toys
import zoo
from pool import RankFailure, RankInfo, RankPool
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autosp


class Broken(nn.Module):
    """A graph break between two layers; the second graph mixes the sharded activation with plain parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 16)
        self.first = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embedding(input_ids))
        torch._dynamo.graph_break()
        x = x + torch.tanh(self.norm(x))
        q = x.unsqueeze(1)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].reshape(-1, 32), labels[:, 1:].reshape(-1))


def across_a_break(rank_info: RankInfo, lengths: list[int]) -> list[parity.Result]:
    autosp.initialize({"autosp": {"inner_backend": "aot_eager"}})
    model = Broken()
    compiled = torch.compile(model, backend="autosp")
    results = []
    for length in lengths:
        ids = torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(length))
        batch = {"input_ids": ids, "labels": ids}
        results.append(parity.compare(model, compiled, batch, prepare=autosp.prepare_batch, loss_of=lambda out: out))
    return results


@pytest.mark.skipif(torch.__version__ < "2.13", reason="before torch 2.13 a DTensor subclass cannot trace as its whole")
@pytest.mark.parametrize(
    ("world_size", "lengths"), [(2, [16, 24, 17, 7]), pytest.param(3, [17], marks=pytest.mark.slow)]
)
def test_a_graph_break_in_the_middle(ranks: RankPool, world_size: int, lengths: list[int]) -> None:
    for results in ranks.run(across_a_break, lengths, world_size=world_size):
        for result in results:
            result.check()
        assert results[-1].graphs > 1


@pytest.mark.skipif(torch.__version__ < "2.13", reason="before torch 2.13 a DTensor subclass cannot trace as its whole")
def test_a_rank_of_one_row_behind_a_break_is_refused_by_all(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="a rank of 3 holds 1 of") as failure:
        ranks.run(across_a_break, [7], world_size=3)
    assert len(failure.value.tracebacks) == 3


def returned(rank_info: RankInfo, outputs: str, length: int) -> dict[str, Any]:
    autosp.initialize({"autosp": {"inner_backend": "aot_eager", "outputs": outputs}})
    model = zoo.build("llama", num_hidden_layers=1)
    batch = zoo.batch(length)
    expected = model(**batch).logits
    logits = torch.compile(model, backend="autosp")(**autosp.prepare_batch(batch)).logits
    block = -(-length // rank_info.world_size)
    mine = expected[:, rank_info.rank * block : (rank_info.rank + 1) * block]
    if outputs == "dtensor":
        assert isinstance(logits, DTensor) and logits.shape == expected.shape
        torch.testing.assert_close(logits.to_local(), mine, rtol=1e-5, atol=1e-6)
        logits = logits.full_tensor()
    else:
        assert not isinstance(logits, DTensor)
    torch.testing.assert_close(logits, mine if outputs == "local" else expected, rtol=1e-5, atol=1e-6)
    return {"shape": tuple(logits.shape)}


@pytest.mark.parametrize(
    ("outputs", "length"),
    [
        ("dtensor", 17),
        pytest.param("full", 17, marks=pytest.mark.slow),
        pytest.param("local", 17, marks=pytest.mark.slow),
        pytest.param("dtensor", 16, marks=pytest.mark.slow),
    ],
)
def test_returned_logits(ranks: RankPool, outputs: str, length: int) -> None:
    shapes = [found["shape"] for found in ranks.run(returned, outputs, length, world_size=2)]
    assert sum(shape[1] for shape in shapes) == (length if outputs == "local" else 2 * length)


def recomputed(rank_info: RankInfo, checkpointing: bool) -> dict[str, collections.Counter[str]]:
    """Operators of the forward and backward graph that AOTAutograd makes of the local program."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_compiler

    from autosp import inner

    counts: dict[str, collections.Counter[str]] = {}

    def count(name: str) -> Any:
        def compiler(gm: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
            counts[name] = collections.Counter(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
            return gm

        return make_boxed_compiler(compiler)

    original = inner.lookup_backend
    inner.lookup_backend = lambda name: aot_autograd(fw_compiler=count("forward"), bw_compiler=count("backward"))
    try:
        autosp.initialize({"autosp": {"inner_backend": "aot_eager"}})
        model = zoo.build("llama", num_hidden_layers=1)
        if checkpointing:
            model.gradient_checkpointing_enable()
        out = torch.compile(model.train(), backend="autosp")(**autosp.prepare_batch(zoo.batch(16)))
        out.loss.backward()
    finally:
        inner.lookup_backend = original
    return counts


def test_checkpointed_layers_are_partitioned_and_recomputed(ranks: RankPool) -> None:
    exchange = "_c10d_functional.all_to_all_single.default"
    plain = ranks.run(recomputed, False, world_size=2)[0]
    checkpointed = ranks.run(recomputed, True, world_size=2)[0]
    assert plain["forward"][exchange] == checkpointed["forward"][exchange] == 2
    assert plain["backward"][exchange] == 2
    assert checkpointed["backward"][exchange] == 4
    assert checkpointed["backward"]["aten.mm.default"] > plain["backward"]["aten.mm.default"]


def checkpointed_parity(rank_info: RankInfo, lengths: list[int]) -> list[parity.Result]:
    def build() -> nn.Module:
        model = zoo.build("llama")
        model.gradient_checkpointing_enable()
        return model.train()

    return parity.run_model(rank_info, build, [zoo.batch(n) for n in lengths], config=parity.AOT_EAGER)


@pytest.mark.parametrize("lengths", [[17], pytest.param([16, 17], marks=pytest.mark.slow)], ids=str)
def test_checkpointed_layers_are_exact(ranks: RankPool, lengths: list[int]) -> None:
    for results in ranks.run(checkpointed_parity, lengths, world_size=2):
        for result in results:
            result.check()


def unknown_inputs(rank_info: RankInfo) -> None:
    autosp.initialize({"autosp": {"inner_backend": "aot_eager"}})
    model = nn.Linear(8, 8)
    torch.compile(model, backend="autosp")(torch.randn(2, 8))


def test_no_sequence_input_is_refused_with_the_list_of_inputs(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"no input of this graph is known to run over the sequence") as failure:
        ranks.run(unknown_inputs, world_size=2)
    assert "(2, 8)" in str(failure.value)
    assert "prepare_autosp_inputs" in str(failure.value)


def wrong_mode(rank_info: RankInfo) -> None:
    autosp.initialize({})
    torch.compile(nn.Linear(8, 8), backend="autosp", mode="max-autotune")(torch.randn(2, 8))


def test_a_compile_mode_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="mode='max-autotune' has no effect"):
        ranks.run(wrong_mode, world_size=2)


class Normalised(nn.Module):
    """Divides rows by their norm without an epsilon: a padding row of zeros would turn weight gradients into NaN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 16, padding_idx=0)
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        x = x / x.norm(dim=-1, keepdim=True)
        q = x.unsqueeze(1)
        x = F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)
        x = x / x.norm(dim=-1, keepdim=True) / torch.arange(1, input_ids.shape[1] + 1)[:, None]
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].reshape(-1, 32), labels[:, 1:].reshape(-1))


def normalised(rank_info: RankInfo) -> parity.Result:
    # One head on three ranks: a ring, which AOTAutograd traces through.
    autosp.initialize({"autosp": {"inner_backend": "aot_eager", "attention": "ring"}})
    model = Normalised()
    ids = torch.randint(1, 32, (2, 17), generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(model, backend="autosp")
    batch = {"input_ids": ids, "labels": ids}
    return parity.compare(model, compiled, batch, prepare=autosp.prepare_batch, loss_of=lambda out: out)


def test_padding_rows_stay_finite(ranks: RankPool) -> None:
    for result in ranks.run(normalised, world_size=3):
        result.check()


class Probe(nn.Module):
    """Uses a layer without gradient first and with gradient afterwards, as a stop-gradient target does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 16)
        self.layer = nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(64, 16) * 0.1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        positions = self.table[: input_ids.shape[1]]
        with torch.no_grad():
            probe = self.layer(x + positions)
        y = self.layer(x + positions) * probe
        return (y * y.detach().mean(1, keepdim=True)).sum()


def probed(rank_info: RankInfo) -> list[parity.Result]:
    autosp.initialize(parity.CASE)
    model = Probe()
    compiled = torch.compile(model, backend="autosp")
    results = []
    for length in (16, 17):
        ids = torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(length))
        out = parity.compare(model, compiled, {"input_ids": ids}, prepare=autosp.prepare_batch, loss_of=lambda out: out)
        results.append(out)
    return results


def test_a_layer_used_without_gradient_first(ranks: RankPool) -> None:
    for results in ranks.run(probed, world_size=2):
        for result in results:
            result.check()


class DropsWithin(nn.Module):
    """Dropout on the probabilities of attention and after it, inside a checkpointed region."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = toys.build(dropout=0.3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        toy = self.toy

        def region(x: torch.Tensor) -> torch.Tensor:
            return x + nn.functional.dropout(toy.attention(toy.norm(x)), 0.3)

        x = checkpoint(region, toy.embed(input_ids), use_reentrant=False)
        return toys.pad_slice(toy, toy.head(x), labels)


def slopes(rank_info: RankInfo) -> tuple[float, float, float, float]:
    """The loss, that of another seed, the slope along the gradient as the backward has it, and by differences."""
    autosp.initialize(parity.AOT_EAGER)
    model = DropsWithin().double().train()
    compiled = torch.compile(model, backend="autosp")

    def loss(seed: int = 3) -> torch.Tensor:
        torch.manual_seed(seed)
        return compiled(**autosp.prepare_batch(toys.batch(17)))

    first, other, step = loss(), loss(4), 1e-5
    first.backward()
    used = [p for p in model.parameters() if p.grad is not None]
    directions = [p.grad.clone() for p in used]
    ahead_and_behind = []
    for distance in (step, -2 * step):
        with torch.no_grad():
            torch._foreach_add_(used, directions, alpha=distance)
        ahead_and_behind.append(loss().item())
    ahead, behind = ahead_and_behind
    told = sum(d.square().sum().item() for d in directions)
    return first.item(), other.item(), told, (ahead - behind) / (2 * step)


def test_dropout_in_attention_is_the_same_when_recomputed(ranks: RankPool) -> None:
    """A backward that dropped other positions than its forward would have another slope than the loss."""
    everyone = ranks.run(slopes, world_size=2, timeout=120)
    assert everyone[0] == everyone[1]
    for loss, other, told, measured in everyone:
        assert loss != other, "dropout is on"
        assert told == pytest.approx(measured, rel=1e-6)
