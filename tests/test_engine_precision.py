"""Low precision in a training loop: loss scaling, master weights, and sums of small gradients."""

from __future__ import annotations

import math
from typing import Any

import engine_steps
import parity
import pytest
import torch
import toys
from engine_steps import Run
from pool import RankInfo, RankPool
from torch.distributed.fsdp import MixedPrecisionPolicy

import autosp
from autosp.integrations import ddp, fsdp

CONFIG = {"sequence_parallel_size": 2, "autosp": {"inner_backend": "aot_eager"}}


def summed(rank_info: RankInfo, size: int, dtype: torch.dtype) -> list[float]:
    """Gradient of a parameter to which rank 0 gives 256 and every other rank 1."""
    import autosp.backend

    state = autosp.initialize({})
    parameter = torch.zeros(size, dtype=dtype, requires_grad=True)
    out = torch.ops.autosp.enter_sharded(parameter, "sum", state.sp_group)
    out.backward(torch.full_like(out, 256.0 if rank_info.rank == 0 else 1.0))
    assert parameter.grad is not None
    return parameter.grad.unique().tolist()


def test_small_gradients_are_summed_in_fp32(ranks: RankPool) -> None:
    # 256 + 1 is 256 in bf16: added one by one in bf16, the three ones would be lost. 259 rounds to 260.
    assert ranks.run(summed, 1000, torch.bfloat16, world_size=4) == [[260.0]] * 4
    assert ranks.run(summed, 1000, torch.float32, world_size=4) == [[259.0]] * 4


def half_ignored(step: int) -> engine_steps.Batch:
    """Only the second half of the tokens, which rank 1 of 2 holds, has labels."""
    batch = toys.batch(16, seed=step, ignored=0.0)
    batch["labels"][:, :9] = -100
    return batch


def scaled(rank_info: RankInfo, mode: str) -> dict[str, Any]:
    """Four steps in fp16 autocast with a scale that overflows at first."""
    config = {**CONFIG, "autosp": {"inner_backend": "aot_eager", "gradient_reduction": mode}}
    autosp.initialize(config)
    model = toys.build()
    compiled = torch.compile(model, backend="autosp")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, backoff_factor=2.0**-8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {"scales": [], "finite": [], "moved": []}
    for step in range(3):
        before = model.head.weight.detach().clone()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = compiled(**autosp.prepare_batch(half_ignored(step))).loss
        scaler.scale(loss).backward()
        found["finite"].append(bool(model.head.weight.grad.isfinite().all()))
        if mode == "engine_sum":
            return found
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found["scales"].append(scaler.get_scale())
        found["moved"].append(bool((model.head.weight != before).any()))
    found["weight"] = model.head.weight.detach().clone()
    return found


def scaled_alone() -> torch.Tensor:
    """The two steps that are not skipped, in one process and fp32."""
    model = toys.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2):
        model(**half_ignored(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.head.weight.detach() - toys.build().head.weight.detach()


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: RankPool) -> None:
    # What a rank has before the sum: rank 0 has no labels, hence no overflow.
    assert [found["finite"] for found in ranks.run(scaled, "engine_sum")] == [[True], [False]]
    expected = scaled_alone()
    for found in ranks.run(scaled, "graph"):
        assert found["finite"] == [False, True, True]
        assert found["moved"] == [False, True, True]
        assert found["scales"] == [2.0**12] * 3
        moved = found["weight"] - toys.build().head.weight.detach()
        assert (moved - expected).abs().max() <= 2e-2 * expected.abs().max()


def scaled_shards(rank_info: RankInfo, half_weights: bool) -> dict[str, Any]:
    """The same under FSDP2, where each rank sees its shard of a gradient only; with clipping between."""
    autosp.initialize(CONFIG)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = fsdp.fully_shard(toys.build(), **({"mp_policy": policy} if half_weights else {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, backoff_factor=2.0**-8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {"scales": [], "moved": [], "norms": []}
    for step in range(3):
        before = parity.full(model.head.weight).detach().clone()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not half_weights):
            loss = model(**autosp.prepare_batch(half_ignored(step))).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found["norms"].append(parity.full(torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found["scales"].append(scaler.get_scale())
        found["moved"].append(bool((parity.full(model.head.weight) != before).any()))
    found["weight"] = parity.full(model.head.weight.detach())
    return found


@pytest.mark.parametrize("half_weights", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_overflow_in_one_shard_skips_the_step_on_all(ranks: RankPool, half_weights: bool) -> None:
    expected = scaled_alone()
    for found in ranks.run(scaled_shards, half_weights):
        assert found["moved"] == [False, True, True]
        assert found["scales"] == [2.0**12] * 3
        assert [math.isfinite(norm) for norm in found["norms"]] == [False, True, True]
        moved = found["weight"] - toys.build().head.weight.detach()
        assert (moved - expected).abs().max() <= 2e-2 * expected.abs().max()


def masters(rank_info: RankInfo) -> tuple[Run, Run]:
    """bf16 weights, fp32 masters that the optimizer steps, under DDP."""
    autosp.initialize(CONFIG)
    expected = engine_steps.one_process(toys.build(), replicas=2, lr=0.1)
    master = toys.build()
    before = {n: p.detach().clone() for n, p in master.named_parameters()}
    working = toys.build(dtype=torch.bfloat16)
    parallel = ddp.wrap(working)
    optimizer = torch.optim.SGD(master.parameters(), lr=0.1)
    run = Run()
    for step in range(2):
        loss = parallel(**autosp.prepare_batch(engine_steps.batch_of(step, 0, rank_info.rank // 2))).loss
        loss.backward()
        value = loss.detach().float()
        torch.distributed.all_reduce(value)
        run.losses.append(value.item() / 4)
        for low, high in zip(working.parameters(), master.parameters(), strict=True):
            assert low.grad is not None
            high.grad = low.grad.float()
            low.grad = None
        if step == 0:
            run.gradients = {n: p.grad.clone() for n, p in master.named_parameters() if p.grad is not None}
        optimizer.step()
        with torch.no_grad():
            for low, high in zip(working.parameters(), master.parameters(), strict=True):
                low.copy_(high)
    run.moved = {n: p.detach() - before[n] for n, p in master.named_parameters()}
    return run, expected


@pytest.mark.slow
def test_fp32_master_weights(ranks: RankPool) -> None:
    for run, expected in ranks.run(masters, world_size=4):
        assert run.losses == pytest.approx(expected.losses, rel=2e-2)
        worst = max(
            (run.moved[name] - value).abs().max().item() / max(value.abs().max().item(), 1e-3)
            for name, value in expected.moved.items()
        )
        assert worst <= 5e-2 and not math.isnan(worst)
