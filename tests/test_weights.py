"""Ranks of a sequence group that hold different weights are told at the first step, not given a plausible loss."""

from __future__ import annotations

import parity
import torch
import toys
from pool import RankInfo, RankPool

import autosp


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
        model.attention.q.weight[0, 0] += 1e-7 * rank_info.rank  # as rounding may leave it after some steps
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
