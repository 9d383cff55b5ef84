"""Plain torch and DistributedDataParallel: two steps equal one process, and whose traffic a backward has."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import engine_steps
import pytest
import torch
import torch.distributed as dist
import toys
from engine_steps import Run
from pool import RankFailure, RankInfo, RankPool
from torch.nn.parallel import DistributedDataParallel

import autosp
from autosp.integrations import ddp

SP2 = {"sequence_parallel_size": 2, "autosp": {"inner_backend": "aot_eager"}}


def mean_over_world(value: torch.Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def wrapped(model: torch.nn.Module, how: str) -> torch.nn.Module:
    """The ways in which a model comes under DDP."""
    if how == "plain":
        return torch.compile(model, backend="autosp")
    if how == "integration":
        # With find_unused_parameters the logits, which have no gradient, go through an autograd function of DDP's.
        return ddp.wrap(model, bucket_cap_mb=1, find_unused_parameters=True)
    if how == "compiled inside":
        return DistributedDataParallel(torch.compile(model, backend="autosp"), bucket_cap_mb=1)
    assert how == "compiled outside"
    return torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend="autosp")


def trained(
    rank_info: RankInfo, how: str, *, accumulation: int = 1, clip: float | None = None, config: Any = SP2
) -> tuple[Run, Run]:
    """Two steps on dp x sp ranks, and two steps of one process."""
    state = autosp.initialize(config)
    dp = state.coordinates["dp"]
    expected = engine_steps.one_process(toys.build(), replicas=state.sizes["dp"], accumulation=accumulation, clip=clip)
    model = toys.build()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    parallel = wrapped(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = Run()
    for step in range(2):
        total = 0.0
        for micro in range(accumulation):
            last = micro == accumulation - 1
            silent = how != "plain" and not last
            with parallel.no_sync() if silent else contextlib.nullcontext():  # type: ignore[operator]
                batch = autosp.prepare_batch(engine_steps.batch_of(step, micro, dp))
                loss = parallel(**batch).loss / accumulation
                loss.backward()
            total += mean_over_world(loss)
        if clip is not None:
            run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        if step == 0:
            run.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(total)
    run.moved = {n: p.detach() - before[n] for n, p in model.named_parameters()}
    return run, expected


@pytest.mark.parametrize(
    ("how", "settings", "world_size"),
    [
        ("plain", {"accumulation": 2, "clip": 0.1}, 2),
        ("integration", {"accumulation": 2, "clip": 0.1}, 4),
        pytest.param("compiled inside", {}, 4, marks=pytest.mark.slow),
        pytest.param("compiled outside", {}, 4, marks=pytest.mark.slow),
        pytest.param("compiled inside", {"accumulation": 2, "clip": 0.1}, 4, marks=pytest.mark.slow),
    ],
)
def test_two_steps_equal_one_process(ranks: RankPool, how: str, settings: dict[str, Any], world_size: int) -> None:
    for run, expected in ranks.run(trained, how, world_size=world_size, **settings):
        run.check(expected)


def reductions(rank_info: RankInfo, how: str) -> list[int]:
    """Elements of each all-reduce in the backward of one step."""
    autosp.initialize(SP2)
    model = toys.build()
    parallel = wrapped(model, how)
    for step in range(2):
        loss = parallel(**autosp.prepare_batch(engine_steps.batch_of(step, 0, 0))).loss
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            loss.backward()
    return sorted(math.prod(event.input_shapes[0]) for event in profile.events() if event.name == "gloo:all_reduce")


PARAMETERS = [parameter.numel() for parameter in toys.build().parameters()]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        # The one bucket of all gradients, and DDP's own map of the parameters that were used.
        ("integration", sorted([sum(PARAMETERS), len(PARAMETERS)])),
        # One sum a parameter of ours, and the bucket of DDP.
        pytest.param("compiled inside", sorted([*PARAMETERS, sum(PARAMETERS)]), marks=pytest.mark.slow),
    ],
)
def test_whose_reductions_a_backward_has(ranks: RankPool, how: str, expected: list[int]) -> None:
    assert ranks.run(reductions, how) == [expected] * 2


def split(rank_info: RankInfo) -> None:
    autosp.initialize(SP2)
    torch._dynamo.config.optimize_ddp = True
    try:
        # Larger than the first bucket of DDP.
        model = torch.compile(toys.build(vocab=20_000), backend="autosp")
        DistributedDataParallel(model, bucket_cap_mb=1)(**autosp.prepare_batch(toys.batch(16)))
    finally:
        torch._dynamo.config.optimize_ddp = False


def test_a_graph_cut_by_ddp_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="optimize_ddp cut the graph at the gradient buckets"):
        ranks.run(split)


def refusals(rank_info: RankInfo) -> dict[str, str]:
    found: dict[str, str] = {}
    record = engine_steps.recorder(found)
    record("no state", lambda: ddp.wrap(toys.build()))
    record("wrong state", lambda: ddp.wrap(toys.build(), state=3))  # type: ignore[arg-type]
    autosp.initialize(SP2)
    record("no module", lambda: ddp.wrap(print))  # type: ignore[arg-type]
    record("compiled", lambda: ddp.wrap(torch.compile(toys.build())))
    inner = toys.build()
    inner.mlp.compile()
    record("compiled inside", lambda: ddp.wrap(inner))
    record("option", lambda: ddp.wrap(toys.build(), options={"gradient_reduction": "engine_sum"}))
    record("unknown option", lambda: ddp.wrap(toys.build(), options={"output": "full"}))
    alone = [dist.new_group([rank]) for rank in range(2)][rank_info.rank]
    record("group", lambda: ddp.wrap(toys.build(), process_group=alone))
    autosp.initialize({"autosp": {"gradient_reduction": "engine_sum"}})
    record("setting", lambda: ddp.wrap(toys.build()))
    autosp.initialize({"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 1})
    record("vocabulary", lambda: ddp.wrap(toys.build()))
    return found


def test_what_does_not_fit_is_refused(ranks: RankPool) -> None:
    for found in ranks.run(refusals):
        assert "call autosp.initialize(config) first" in found["no state"]
        assert "state is a int" in found["wrong state"]
        assert "model is a builtin_function_or_method" in found["no module"]
        assert "the model is compiled already" in found["compiled"]
        assert "its module 'mlp'" in found["compiled inside"]
        assert found["option"] == found["setting"]
        assert "gradient_reduction is 'engine_sum', but autosp.integrations.ddp averages" in found["option"]
        assert "unknown 'output'" in found["unknown option"]
        assert "process_group holds 1 of 2 ranks" in found["group"]
        assert "vocabulary axis of 2 ranks" in found["vocabulary"]


def test_no_process_group_is_refused() -> None:
    state = autosp.initialize({"sequence_parallel_size": 1})
    with pytest.raises(autosp.InputError, match="there is no process group"):
        ddp.wrap(toys.build(), state=state)
    autosp.mesh.reset()  # type: ignore[attr-defined]


def test_the_script_of_the_page_runs_as_it_stands(ranks: RankPool, tmp_path: Path) -> None:
    script = tmp_path / "train_ddp.py"
    script.write_text(engine_steps.script_of("ddp"))
    results = ranks.run(engine_steps.run_script, str(script), world_size=4, process_group=False, timeout=240)
    assert all(result["losses"] == pytest.approx(results[0]["losses"], rel=1e-6) for result in results)
    assert len(results[0]["losses"]) == 4 and results[0]["losses"][-1] < results[0]["losses"][0]
