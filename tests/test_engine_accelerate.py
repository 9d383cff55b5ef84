"""Accelerate in a loop of one's own: the script of its page, the order of samples, resuming, and what is refused."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import engine_steps
import pytest
import torch
import toys
from pool import RankInfo, RankPool
from torch.utils.data import DataLoader, WeightedRandomSampler

import autosp

SP2 = {"sequence_parallel_size": 2, "autosp": {"inner_backend": "aot_eager"}}


def run(ranks: RankPool, folder: Path, world_size: int) -> list[dict[str, Any]]:
    folder.mkdir()
    script = folder / "train_accelerate.py"
    script.write_text(engine_steps.script_of("accelerate"))
    return ranks.run(engine_steps.run_script, str(script), world_size=world_size, process_group=False, timeout=300)


@pytest.mark.parametrize("world_size", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_the_script_of_the_page_prints_what_one_process_prints(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    (expected,) = run(ranks, tmp_path / "one", 1)
    assert len(expected["losses"]) == len(set(expected["losses"])) == 8 and len(expected["best"]) == 6
    for found in run(ranks, tmp_path / "many", world_size):
        assert found["losses"] == pytest.approx(expected["losses"], rel=2e-5)
        assert found["best"] == expected["best"]
    assert (tmp_path / "many" / "checkpoint" / "model.safetensors").exists()


def fresh_accelerator(**settings: Any) -> Any:
    import accelerate

    from autosp.integrations.transformers import SequenceParallelAccelerator

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return SequenceParallelAccelerator(cpu=True, **settings)


def orders(rank_info: RankInfo, folder: str) -> dict[str, Any]:
    """What each rank sees when every rank has a seed of its own, and after a resume in the middle of an epoch."""
    state = autosp.initialize(SP2)
    found: dict[str, Any] = {"dp": state.coordinates["dp"]}
    torch.manual_seed(rank_info.rank)
    accelerator = fresh_accelerator()
    numbers: Any = list(range(24))
    shuffled = accelerator.prepare(DataLoader(numbers, batch_size=3, shuffle=True))
    found["shuffled"] = [batch.tolist() for batch in shuffled]
    weighted = WeightedRandomSampler([1.0] * 24, 24, replacement=False)
    found["weighted"] = [b.tolist() for b in accelerator.prepare(DataLoader(numbers, batch_size=3, sampler=weighted))]
    own = torch.Generator().manual_seed(rank_info.rank)
    weighted = WeightedRandomSampler([1.0] * 24, 24, replacement=False, generator=own)
    found["own"] = [b.tolist() for b in accelerator.prepare(DataLoader(numbers, batch_size=3, sampler=weighted))]
    accelerator.save_state(folder)
    found["second epoch"] = [batch.tolist() for batch in shuffled]
    accelerator.load_state(folder)
    shuffled.set_epoch(1)
    found["resumed"] = [batch.tolist() for batch in accelerator.skip_first_batches(shuffled, 2)]
    return found


def test_ranks_with_seeds_of_their_own_split_one_order(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(orders, str(tmp_path), world_size=4)
    for key in ("shuffled", "weighted", "own", "second epoch"):
        assert found[0][key] == found[1][key] and found[2][key] == found[3][key], key
        together = [n for rank in (0, 2) for batch in found[rank][key] for n in batch]
        assert sorted(together) == list(range(24)), key
        assert together != list(range(24)), key
    for one in found:
        assert one["second epoch"] != one["shuffled"]
        assert one["resumed"] == one["second epoch"][2:]


def learning_rates(rank_info: RankInfo) -> dict[str, Any]:
    """Of two schedules, after each of three steps of two micro-batches."""
    state = autosp.initialize(SP2)
    found: dict[str, Any] = {"dp": state.sizes["dp"]}
    for name in ("inverse", "with an end"):
        accelerator = fresh_accelerator(gradient_accumulation_steps=2)
        weight = torch.nn.Parameter(torch.zeros(1))
        plain = torch.optim.SGD([weight], lr=1.0)
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(plain, lambda steps: 1 / (1 + steps))
        if name == "with an end":
            schedule = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=1.0, total_steps=2)
        optimizer, scheduler = accelerator.prepare(plain, schedule)
        found[name] = []
        for micro in range(6):
            with accelerator.accumulate():
                weight.grad = torch.ones(1)
                optimizer.step()
                scheduler.step()
            if micro % 2:
                found[name].append(scheduler.get_last_lr()[0])
        assert weight.item() < 0.0 and len(accelerator._schedulers) == 1
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_schedule_moves_on_by_data_parallel_groups(ranks: RankPool, world_size: int) -> None:
    for found in ranks.run(learning_rates, world_size=world_size):
        assert found["dp"] == world_size // 2
        assert found["inverse"] == pytest.approx([1 / (1 + step * found["dp"]) for step in (1, 2, 3)])
        assert found["with an end"][0] != 1.0 and found["with an end"][1] == found["with an end"][2]


def refused(rank_info: RankInfo) -> dict[str, str]:
    import accelerate

    autosp.initialize(SP2)
    found: dict[str, str] = {}
    record = engine_steps.recorder(found)
    before = dict(os.environ)
    record("dynamo", lambda: fresh_accelerator(dynamo_backend="eager"))
    for name in set(os.environ) - set(before):  # Accelerate writes its settings there
        del os.environ[name]
    accelerator = fresh_accelerator()
    # Accelerate itself takes sizes on devices only, so that they are put in afterwards here.
    accelerator.state.parallelism_config = accelerate.ParallelismConfig(dp_replicate_size=2)
    record("parallelism", accelerator.adopt)
    accelerator = fresh_accelerator()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.prepare(torch.nn.Linear(2, 2))
        found["plain"] = "; ".join(str(one.message) for one in caught)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.prepare(accelerator.compile_model(toys.build()), torch.compile(toys.build(), backend="autosp"))
        accelerator.prepare_model(torch.nn.Linear(2, 2), evaluation_mode=True)
        found["compiled"] = "; ".join(str(one.message) for one in caught)
    return found


def test_what_would_not_be_compiled_for_groups_is_told(ranks: RankPool) -> None:
    for found in ranks.run(refused):
        assert "Accelerate is told to compile with EAGER" in found["dynamo"]
        assert "Accelerate has a parallelism_config of 2 ranks; leave it out" in found["parallelism"]
        assert "prepare got a Linear that is not compiled, so every rank computes the whole sequence" in found["plain"]
        assert "not compiled" not in found["compiled"]
