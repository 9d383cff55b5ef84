"""Ranks of a sequence group that hold different weights are told at the first step, not given a plausible loss."""

from __future__ import annotations

import parity
import pytest
import torch
import toys
from pool import RankInfo, RankPool
from torch.nn.parallel import DistributedDataParallel

import autosp
from autosp.weights import choose_watched

REDUCTION = "gradient_reduction"
HEAD = {"autotp_size": 2, "vocab_parallel_lm_head": True}


def told(rank_info: RankInfo) -> dict[str, str]:
    autosp.initialize(parity.CASE)
    found: dict[str, str] = {}

    def record(name: str, model: torch.nn.Module, length: int = 16) -> None:
        try:
            torch.compile(model, backend="autosp")(**autosp.prepare_batch(toys.batch(length)))
            found[name] = "nothing raised"
        except autosp.RankMismatchError as error:
            found[name] = str(error)

    record("other seeds", toys.build(seed=rank_info.rank))
    model = toys.build()
    with torch.no_grad():
        model.attention.q.weight[0, 0] += 1e-3 * rank_info.rank
    record("one value", model)
    model = toys.build()
    record("alike", model)
    with torch.no_grad():
        model.attention.q.weight[0, 0] += 3e-8 * rank_info.rank  # as rounding may leave it after some steps
    record("drifted", model, 17)
    return found


def test_other_weights_on_a_rank_are_told_at_the_first_step(ranks: RankPool) -> None:
    for found in ranks.run(told):
        assert "rank 1 differs from rank 0 in " in found["other seeds"]
        assert "embed.weight" in found["other seeds"] and "head.weight" in found["other seeds"]
        assert "hold different models" in found["one value"]
        assert "rank 1 differs from rank 0 in attention.q.weight\n" in found["one value"]
        assert "Seed every rank alike" in found["one value"]
        assert found["alike"] == found["drifted"] == "nothing raised"


def halved(rank_info: RankInfo) -> dict[str, str]:
    """Ranks that share a vocabulary hold other rows of the head, and must hold the rest alike."""
    state = autosp.initialize({"sequence_parallel_size": 2, "tensor_parallel": HEAD, **parity.CASE})
    found: dict[str, str] = {}
    for name in ("alike", "norm"):
        model = toys.build()
        assert state.mesh is not None
        autosp.shard_lm_head(model, state.mesh["tp"])
        with torch.no_grad():
            model.norm.weight[0] += name == "norm" and rank_info.rank == 3
        try:
            torch.compile(model, backend="autosp")(**autosp.prepare_batch(toys.batch(16)))
            found[name] = "nothing raised"
        except autosp.RankMismatchError as error:
            found[name] = str(error)
    return found


def test_rows_of_a_sharded_head_may_differ(ranks: RankPool) -> None:
    with_head = ranks.run(halved, world_size=4)
    for found in with_head:
        assert found["alike"] == "nothing raised"
        assert "rank 3 differs from rank 0 in norm.weight\n" in found["norm"]


def drifting(rank_info: RankInfo, how: str) -> list[str]:
    """Three steps in which gradients are reduced by nobody, or by the wrong group, or as they should be."""
    mode = "graph" if how == "graph" else "engine_mean"
    state = autosp.initialize({"sequence_parallel_size": 2, "autosp": {"inner_backend": "eager", REDUCTION: mode}})
    assert state.mesh is not None
    model = toys.build()
    run = torch.compile(model, backend="autosp")
    if how.startswith("ddp"):
        group = state.mesh.get_group("dp") if how == "ddp over dp" else None
        run = DistributedDataParallel(model if how == "ddp outside" else run, process_group=group)
        run = torch.compile(run, backend="autosp") if how == "ddp outside" else run
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    told = []
    for step in range(3):
        try:
            run(**autosp.prepare_batch(toys.batch(16, seed=step))).loss.backward()
        except autosp.RankMismatchError as error:
            return [*told, str(error)]
        optimizer.step()
        optimizer.zero_grad()
        told.append("nothing raised")
    return told


@pytest.mark.parametrize(("how", "world_size"), [("engine_mean", 2), ("ddp over dp", 4)])
def test_ranks_that_drift_apart_are_told(ranks: RankPool, how: str, world_size: int) -> None:
    for first, *rest in ranks.run(drifting, how, world_size=world_size):
        assert first == "nothing raised" and len(rest) == 1
        assert "drift apart: since the first step " in rest[0]
        assert "with gradient_reduction 'engine_mean'" in rest[0]


@pytest.mark.parametrize(
    "how", ["graph", pytest.param("ddp", marks=pytest.mark.slow), pytest.param("ddp outside", marks=pytest.mark.slow)]
)
def test_ranks_that_move_alike_are_not(ranks: RankPool, how: str) -> None:
    assert ranks.run(drifting, how) == [["nothing raised"] * 3] * 2


def test_which_weight_is_watched() -> None:
    def of(size: int, trained: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype).requires_grad_(trained)

    assert choose_watched([("a", of(300)), ("b", of(256)), ("c", of(255)), ("frozen", of(256, False))]) == "b"
    assert choose_watched([("a", of(3)), ("b", of(8)), ("meta", of(9).to("meta"))]) == "b"
    assert choose_watched([("frozen", of(8, False)), ("numbers", of(8, False, torch.int64))]) is None
