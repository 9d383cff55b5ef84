"""DeepSpeed's own mixed precision: an overflow on one rank skips the step on all; accumulation and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_steps
import pytest
import torch
import torch.distributed as dist
import toys
from engine_steps import Run
from pool import RankInfo, RankPool
from test_engine_deepspeed import JSONS, engine_of, fresh_ranks  # noqa: F401 - a fixture
from test_engine_precision import half_ignored

import autosp
from autosp import mesh

pytest.importorskip("deepspeed")


def overflowing(rank_info: RankInfo, stage: int) -> dict[str, Any]:
    """Steps with a loss scale that overflows at first, on the rank that holds the labels only, until two were taken.

    DeepSpeed refuses fp16 on a CPU that has no fast fp16, which is most; here it is told that there is one.
    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # type: ignore[method-assign]
    mesh.reset()
    model = toys.build()
    fp16 = {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}
    engine = engine_of(model, {"sequence_parallel_size": 2}, stage, fp16=fp16)
    found: dict[str, Any] = {"skipped": [], "losses": []}
    for _ in range(16):
        loss = engine(**autosp.prepare_batch(half_ignored(0))).loss
        engine.backward(loss)
        before = engine.skipped_steps
        engine.step()
        found["skipped"].append(engine.skipped_steps > before)
        found["losses"].append(loss.item())
        if found["skipped"].count(False) == 2:
            break
    found["weight"] = engine.module.head.weight.detach().float()
    return found


def two_steps_alone() -> torch.Tensor:
    """The head after two steps on one batch, in one process and fp32."""
    model = toys.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        model(**half_ignored(0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.head.weight.detach()


@pytest.mark.parametrize(
    "stage",
    [pytest.param(1, marks=pytest.mark.slow), 2],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(fresh_ranks: RankPool, stage: int) -> None:  # noqa: F811
    start = toys.build().head.weight.detach()
    expected = two_steps_alone()
    results = fresh_ranks.run(overflowing, stage, timeout=300)
    for found in results:
        assert found["skipped"][0] and found["skipped"].count(False) == 2
        assert found["skipped"] == results[0]["skipped"]
        assert torch.equal(found["weight"], results[0]["weight"])
        assert (found["weight"] - expected).abs().max() <= 2e-2 * (expected - start).abs().max()


def accumulated(rank_info: RankInfo, stage: int, folder: str) -> dict[str, Any]:
    """Two steps of two micro-batches in bf16 with clipping, a checkpoint, and the step after loading it."""
    mesh.reset()
    more = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    replica = rank_info.rank // 2

    def step(engine: Any, number: int) -> float:
        total = torch.zeros(())
        for micro in range(2):
            loss = engine(**autosp.prepare_batch(engine_steps.batch_of(number, micro, replica))).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / 2
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    model = toys.build()
    engine = engine_of(model, JSONS["both sizes"], stage, **more)
    run = Run(losses=[step(engine, 0), step(engine, 1)])
    start = dict(toys.build().named_parameters())
    run.moved = {n: p.detach().float() - start[n].detach().bfloat16().float() for n, p in model.named_parameters()}
    engine.save_checkpoint(folder)
    found = {"run": run, "third": step(engine, 2)}
    again = engine_of(toys.build(seed=5), JSONS["both sizes"], stage, **more)
    again.load_checkpoint(folder)
    found["resumed"] = step(again, 2)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_accumulation_in_bf16_and_a_checkpoint(fresh_ranks: RankPool, stage: int, tmp_path: Path) -> None:  # noqa: F811
    expected = engine_steps.one_process(toys.build(), replicas=2, accumulation=2, clip=0.5)
    scale = max(value.abs().max().item() for value in expected.moved.values())
    start = dict(toys.build().named_parameters())
    for found in fresh_ranks.run(accumulated, stage, str(tmp_path), world_size=4, timeout=340):
        assert found["run"].losses == pytest.approx(expected.losses, rel=2e-2)
        for name, value in expected.moved.items():
            # A weight itself is exact to a rounding step of bf16 before and after.
            allowed = 3e-2 * scale + 2.0**-7 * start[name].detach().abs()
            assert ((found["run"].moved[name] - value).abs() <= allowed).all(), name
        assert found["resumed"] == found["third"]
