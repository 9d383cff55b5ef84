"""Lengths, heads, dtypes, masks, positions, meshes and ways to reduce gradients."""

from __future__ import annotations

import functools
from typing import Any

import parity
import pytest
import torch
import toys
import zoo
from pool import RankInfo, RankPool
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F


def check_all(everyone: list[list[parity.Result]], rtol: float = 1e-5) -> None:
    for results in everyone:
        for result in results:
            result.check(rtol)


def grid(values: list[Any], quick: set[tuple[Any, int]]) -> list[Any]:
    """Every value at 2, 3 and 4 ranks; those that are not ``quick`` are slow."""
    return [
        pytest.param(value, world, marks=() if (value, world) in quick else pytest.mark.slow)
        for value in values
        for world in (2, 3, 4)
    ]


@pytest.mark.parametrize(("length", "world"), grid([1, 2, 3, 17, 18], {(1, 4), (2, 3), (17, 2)}))
def test_length(ranks: RankPool, length: int, world: int):
    batch = toys.batch(length, ignored=0.0)
    loss = "unshifted" if length == 1 else "pad_slice"
    check_all(ranks.run(parity.run_model, functools.partial(toys.build, loss), [batch], world_size=world))


def count_compilations(rank_info: RankInfo, name: str, lengths: list[int]) -> list[int]:
    import autosp

    autosp.initialize(parity.CASE)
    model = zoo.build("llama", num_hidden_layers=1) if name == "llama" else toys.build()
    make = zoo.batch if name == "llama" else toys.batch
    compiled = torch.compile(model, backend="autosp")
    graphs = []
    torch._dynamo.utils.counters.clear()
    for length in lengths:
        parity.compare(model, compiled, make(length), prepare=autosp.prepare_batch).check()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return graphs


@pytest.mark.parametrize("name", ["toy", pytest.param("llama", marks=pytest.mark.slow)])
def test_new_lengths_recompile_at_most_twice(ranks: RankPool, name: str):
    for graphs in ranks.run(count_compilations, name, [16, 24, 32, 17, 21, 64], timeout=300):
        assert graphs[0] == 1
        assert graphs[2] == 1, f"even lengths share one program: {graphs}"
        assert graphs[-1] <= 2, graphs


@pytest.mark.parametrize("dynamic", parity.mostly_slow([None, True, False], [None]))
def test_batch_sizes(ranks: RankPool, dynamic: bool | None):
    batches = [toys.batch(17, rows=rows) for rows in (1, 2, 3)]
    check_all(ranks.run(parity.run_model, toys.build, batches, dynamic=dynamic))


HEADS = [(8, 8), (8, 2), (8, 1), (6, 3), (9, 3), (28, 7), (40, 8), (3, 1), (2, 2)]


QUICK_HEADS = {((8, 1), 4), ((9, 3), 4), ((40, 8), 3)}


@pytest.mark.parametrize(("heads", "world"), grid(HEADS, QUICK_HEADS))
def test_heads(ranks: RankPool, heads: tuple[int, int], world: int):
    build = functools.partial(toys.build, heads=heads[0], kv_heads=heads[1])
    check_all(ranks.run(parity.run_model, build, [toys.batch(17)], world_size=world))


def two_models(rank_info: RankInfo) -> list[parity.Result]:
    import autosp

    autosp.initialize(parity.CASE)
    models = [toys.build(heads=8, kv_heads=2), toys.build(heads=6, kv_heads=3, size=8)]
    compiled = [torch.compile(model, backend="autosp") for model in models]
    results = []
    for length in (16, 17):
        for model, program in zip(models, compiled, strict=True):
            results.append(parity.compare(model, program, toys.batch(length), prepare=autosp.prepare_batch))
    return results


def test_two_models_in_one_process(ranks: RankPool):
    check_all(ranks.run(two_models))


def two_meshes(rank_info: RankInfo) -> list[parity.Result]:
    import autosp

    wide = autosp.initialize({**parity.CASE, "sequence_parallel_size": 4})
    narrow = autosp.initialize({**parity.CASE, "sequence_parallel_size": 2})
    results = []
    model, other = toys.build(), toys.build(heads=8)
    first = torch.compile(model, backend="autosp", options={"mesh": wide})
    second = torch.compile(other, backend="autosp", options={"mesh": narrow, "outputs": "full"})
    for length in (16, 17):
        results.append(parity.compare(model, first, toys.batch(length), prepare=autosp.prepare_batch))
        results.append(parity.compare(other, second, toys.batch(length), prepare=autosp.prepare_batch))
    return results


@pytest.mark.slow
def test_two_meshes_in_one_process(ranks: RankPool):
    check_all(ranks.run(two_meshes, world_size=4))


class SequenceFirst(nn.Module):
    """``[sequence, batch]`` throughout; attention transposes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = toys.build()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        toy = self.toy
        x = toy.embed(input_ids) + toy.positions(torch.arange(input_ids.shape[0])).unsqueeze(1)
        x = x + toy.attention(toy.norm(x).transpose(0, 1)).transpose(0, 1)
        x = x + toy.mlp(toy.norm(x))
        logits = toy.head(x)
        loss = F.cross_entropy(logits[:-1].reshape(-1, logits.shape[-1]), labels[1:].reshape(-1))
        return toys.Out(loss, logits)


def test_sequence_first(ranks: RankPool):
    batches = []
    for length in (16, 17):
        batches.append({k: v.t().contiguous() for k, v in toys.batch(length, rows=3).items()})
    check_all(ranks.run(parity.run_model, SequenceFirst, batches, seq_dim=0))


def embeddings_as_input(rank_info: RankInfo, name: str) -> list[tuple[parity.Result, float]]:
    import autosp

    autosp.initialize(parity.CASE)
    model = zoo.build("llama", num_hidden_layers=1) if name == "llama" else toys.build()
    make, width = (zoo.batch, 64) if name == "llama" else (toys.batch, 16)
    compiled = torch.compile(model, backend="autosp")
    results = []
    for length in (16, 17):
        labels = make(length)["labels"]
        generator = torch.Generator().manual_seed(length)
        embeds = torch.randn(2, length, width, generator=generator)
        leaves: list[torch.Tensor] = []

        def prepare(batch: dict[str, Any], leaves=leaves) -> dict[str, Any]:
            batch["inputs_embeds"] = batch["inputs_embeds"].detach().requires_grad_()
            leaves.append(batch["inputs_embeds"])
            return autosp.prepare_batch(batch)

        batch = {"inputs_embeds": embeds.requires_grad_(), "labels": labels}
        result = parity.compare(model, compiled, batch, prepare=prepare)
        results.append((result, parity.error(leaves[0].grad, embeds.grad)))
    return results


@pytest.mark.parametrize("name", parity.mostly_slow(["toy", "llama"], ["toy"]))
def test_embeddings_in_place_of_ids(ranks: RankPool, name: str):
    for results in ranks.run(embeddings_as_input, name, timeout=240):
        for result, input_error in results:
            result.check()
            assert input_error <= 1e-5


@pytest.mark.parametrize("dtype", parity.mostly_slow([torch.bfloat16, torch.float16], [torch.bfloat16]))
def test_half_precision(ranks: RankPool, dtype: torch.dtype):
    build = functools.partial(toys.build, "gathered_log_softmax", dtype=dtype)
    check_all(ranks.run(parity.run_model, build, [toys.batch(16), toys.batch(17)]), rtol=2e-2)


@pytest.mark.parametrize("loss", parity.mostly_slow(["pad_slice", "reduction_sum", "several"], ["pad_slice"]))
def test_bfloat16_loss(ranks: RankPool, loss: str):
    build = functools.partial(toys.build, loss, dtype=torch.bfloat16)
    check_all(ranks.run(parity.run_model, build, [toys.batch(16), toys.batch(17)]), rtol=2e-2)


def positions_batch(kind: str, length: int, make: Any) -> dict[str, Any]:
    batch = make(length)
    rows = batch["input_ids"].shape[0]
    if kind == "one_row":
        batch["position_ids"] = torch.arange(length).unsqueeze(0)
    elif kind == "every_row":
        batch["position_ids"] = torch.arange(length).expand(rows, length).contiguous()
    elif kind == "at_100":
        batch["position_ids"] = torch.arange(100, 100 + length).unsqueeze(0)
    elif kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(7), torch.arange(length - 7)]).expand(rows, length).contiguous()
    return batch


POSITIONS = ["none", "one_row", "every_row", "at_100", "packed"]


@pytest.mark.parametrize("kind", parity.mostly_slow(POSITIONS, ["none", "packed"]))
def test_positions(ranks: RankPool, kind: str):
    batches = [positions_batch(kind, length, toys.batch) for length in (16, 17)]
    check_all(ranks.run(parity.run_model, toys.build, batches, world_size=3))


@pytest.mark.parametrize("kind", parity.mostly_slow(["at_100", "packed"], ["packed"]))
def test_positions_of_llama(ranks: RankPool, kind: str):
    batches = [positions_batch(kind, 17, zoo.batch)]
    check_all(ranks.run(parity.run_model, functools.partial(zoo.build, "llama", num_hidden_layers=1), batches))


def dropped(rank_info: RankInfo) -> dict[str, Any]:
    import autosp

    autosp.initialize(parity.CASE)
    compiled = torch.compile(DropoutShows(), backend="autosp")
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        ids = torch.ones(2, 16, dtype=torch.long)
        outputs.append(compiled(**autosp.prepare_batch({"input_ids": ids})).full_tensor())
    return {"outputs": outputs}


class DropoutShows(nn.Module):
    """An embedding of ones, so that the tokens are sharded, and dropout on it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 64)
        nn.init.ones_(self.embed.weight)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.embed(input_ids), 0.25)


def test_dropout_differs_across_shards_and_is_reproducible(ranks: RankPool):
    everyone = ranks.run(dropped)
    for outputs in zip(*(result["outputs"] for result in everyone), strict=True):
        assert torch.equal(*outputs), "both ranks see one and the same whole output"
    first, again, other = everyone[0]["outputs"]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[:, :8], first[:, 8:]), "shards draw different masks"
    assert first.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert (first == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


def train_with_dropout(rank_info: RankInfo) -> list[float]:
    import autosp

    autosp.initialize(parity.CASE)
    model = toys.build(dropout=0.1)
    compiled = torch.compile(model, backend="autosp")
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loss = compiled(**autosp.prepare_batch(toys.batch(17))).loss
        loss.backward()
        losses.append(loss.item())
        grads = parity.gradients(model)
        assert all(torch.isfinite(g).all() for g in grads.values())
        losses.append(sum(g.double().pow(2).sum().item() for g in grads.values()))
    return losses


def test_training_with_dropout(ranks: RankPool):
    first, second = ranks.run(train_with_dropout)
    assert first == second, "loss and gradients are the same on every rank"
    assert first[:2] == first[2:4], "one seed, one result"
    assert first[0] != first[4]


def outputs_as(rank_info: RankInfo, kind: str) -> dict[str, Any]:
    import autosp

    autosp.initialize({"autosp": {"inner_backend": parity.INNER, "outputs": kind}})
    model = toys.build("none")
    compiled = torch.compile(model, backend="autosp")
    batch = toys.batch(17)
    reference = model(**batch).logits
    out = compiled(**autosp.prepare_batch({k: v.clone() for k, v in batch.items()})).logits
    # A loss of the user's own, outside: its gradient flows back through whatever came out.
    target = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1))
    (reference * target).sum().backward()
    expected = parity.gradients(model)
    whole = parity.full(out)
    found: dict[str, Any] = {"sharded": isinstance(out, DTensor), "shape": tuple(out.shape)}
    if kind == "local":
        rows = slice(0, 9) if rank_info.rank == 0 else slice(9, 17)
        reference, target = reference[:, rows], target[:, rows]
    found["error"] = parity.error(whole.detach(), reference.detach())
    (whole * target).sum().backward()
    grads = parity.gradients(model)
    floor = 1e-3 * max(g.abs().max().item() for g in expected.values())
    found["worst"] = max(parity.error(grads[n], expected[n], floor) for n in expected)
    return found


@pytest.mark.parametrize("kind", parity.mostly_slow(["dtensor", "full", "local"], ["dtensor", "local"]))
def test_outputs(ranks: RankPool, kind: str):
    for rank, found in enumerate(ranks.run(outputs_as, kind)):
        assert found["sharded"] == (kind == "dtensor")
        assert found["shape"][1] == ((9, 8)[rank] if kind == "local" else 17)
        assert found["error"] <= 1e-5
        assert found["worst"] <= 1e-5


def reduced_by_an_engine(rank_info: RankInfo, mode: str, kind: str) -> tuple[float, str]:
    """Emulate the engine of each mode on a mesh of dp 2 x sp 2 whose data-parallel replicas see different batches."""
    import torch.distributed as dist

    import autosp

    config = {"inner_backend": parity.INNER, "gradient_reduction": mode}
    state = autosp.initialize({"autosp": config, "sequence_parallel_size": 2})
    model = toys.LearnedBias("table") if kind == "learned_bias" else toys.build(tied=True)
    expected: dict[str, torch.Tensor] = {}
    for replica in range(2):
        model(**toys.batch(17, seed=replica)).loss.backward()
        for name, grad in parity.gradients(model).items():
            expected[name] = expected.get(name, 0) + grad / 2
    compiled = torch.compile(model, backend="autosp")
    compiled(**autosp.prepare_batch(toys.batch(17, seed=state.coordinates["dp"]))).loss.backward()
    found = parity.gradients(model)
    assert set(found) == set(expected)
    for grad in found.values():
        dist.all_reduce(grad)
        # "graph" and "engine_mean" serve an engine that averages over the world, "engine_sum" one that sums over sp.
        grad /= 2 if mode == "engine_sum" else 4
    floor = 1e-3 * max(g.abs().max().item() for g in expected.values())
    return max((parity.error(found[name], expected[name], floor), name) for name in expected)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("tied", "graph"),
        ("learned_bias", "engine_mean"),
        pytest.param("learned_bias", "engine_sum", marks=pytest.mark.slow),
        pytest.param("tied", "engine_mean", marks=pytest.mark.slow),
        pytest.param("tied", "engine_sum", marks=pytest.mark.slow),
        pytest.param("learned_bias", "graph", marks=pytest.mark.slow),
    ],
)
def test_gradient_reduction(ranks: RankPool, mode: str, kind: str):
    for worst, name in ranks.run(reduced_by_an_engine, mode, kind, world_size=4):
        assert worst <= 1e-5, name
