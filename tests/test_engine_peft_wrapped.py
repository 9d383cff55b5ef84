"""LoRA adapters under engines: two steps equal one process, only adapters get gradients, only theirs are reduced."""

from __future__ import annotations

import math
from typing import Any

import engine_steps
import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from engine_steps import Run
from pool import RankInfo, RankPool
from test_engine_peft import SP2, adapted

import autosp
from autosp.integrations import ddp, fsdp

pytest.importorskip("peft")


def batch_of(step: int, micro: int, replica: int) -> engine_steps.Batch:
    return zoo.batch(17, seed=100 * step + 10 * micro + replica)


def wrapped(model: torch.nn.Module, how: str) -> torch.nn.Module:
    if how == "ddp":
        return ddp.wrap(model)
    layers = model.base_model.model.model.layers if how == "fsdp layered" else None  # type: ignore[union-attr]
    return fsdp.fully_shard(model, layers=layers)  # type: ignore[arg-type, return-value]


def reduced(profile: torch.profiler.profile) -> list[int]:
    """Elements of each reduction that a rank took part in."""
    events = [e for e in profile.events() if e.name in ("gloo:all_reduce", "gloo:reduce_scatter")]
    return sorted(math.prod(event.input_shapes[0]) for event in events)


def trained(rank_info: RankInfo, how: str) -> dict[str, Any]:
    state = autosp.initialize(SP2)
    settings: dict[str, Any] = {"replicas": state.sizes["dp"], "batches": batch_of}
    found: dict[str, Any] = {"expected": engine_steps.one_process(adapted(), **settings)}
    model = adapted()
    model.base_model.model.config.use_cache = False  # type: ignore[union-attr]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    parallel = wrapped(model, how)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    run = Run()
    for step in range(2):
        loss = parallel(**autosp.prepare_batch(batch_of(step, 0, state.coordinates["dp"]))).loss
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            loss.backward()
        found["reduced"] = reduced(profile)
        total = loss.detach().clone()
        dist.all_reduce(total)
        run.losses.append(total.item() / dist.get_world_size())
        if step == 0:
            run.gradients = {n: parity.full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    moved = {n: parity.full(p.detach()) - before[n] for n, p in model.named_parameters()}
    run.moved = {n: moved[n] for n in trainable}
    found["run"] = run
    found["frozen"] = max(value.abs().max().item() for n, value in moved.items() if n not in run.moved)
    found["adapters"] = sum(before[n].numel() for n in trainable)
    if how == "ddp":
        # The same compiled module after its adapters were merged into its weights.
        ids = autosp.prepare_batch(batch_of(9, 0, state.coordinates["dp"]))
        with torch.no_grad():
            found["apart"] = parallel(**ids).loss.item()
            model.merge_adapter()  # type: ignore[operator]
            found["merged"] = parallel(**ids).loss.item()
    return found


@pytest.mark.parametrize(
    ("how", "world_size"),
    [
        pytest.param("ddp", 4, marks=pytest.mark.slow),
        ("fsdp", 2),
        pytest.param("fsdp layered", 2, marks=pytest.mark.slow),
    ],
)
def test_two_steps_equal_one_process(ranks: RankPool, how: str, world_size: int) -> None:
    for found in ranks.run(trained, how, world_size=world_size, timeout=300):
        found["run"].check(found["expected"])
        assert found["frozen"] == 0.0
        # FSDP2 pads what it scatters so that each rank has equal rows.
        padding = 0 if how == "ddp" else 8 * world_size * len(found["run"].moved)
        assert found["adapters"] <= sum(found["reduced"]) <= found["adapters"] + padding, found["reduced"]
        if how == "ddp":
            assert found["merged"] == pytest.approx(found["apart"], rel=1e-5)
