"""The pool of rank processes itself: results, failures, time limits, and that nothing leaks from call to call."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure, RankInfo, RankPool


def total(rank_info: RankInfo, start: torch.Tensor) -> tuple[torch.Tensor, int]:
    value = start + rank_info.rank
    dist.all_reduce(value)
    return value, os.getpid()


def fail_on(rank_info: RankInfo, rank: int) -> None:
    if rank_info.rank == rank:
        raise ValueError(f"told to fail on {rank}")
    dist.barrier()


def hang_on(rank_info: RankInfo, rank: int) -> None:
    if rank_info.rank == rank:
        while True:
            time.sleep(0.1)


def die_on(rank_info: RankInfo, rank: int) -> None:
    print("last words")
    if rank_info.rank == rank:
        os._exit(7)
    dist.barrier()


def leave_traces(rank_info: RankInfo) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))


def traces(rank_info: RankInfo) -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "random": torch.rand(1).item(),
        "group": dist.is_initialized(),
        "environment": {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")},
    }


def returns_dtensor(rank_info: RankInfo) -> Any:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (rank_info.world_size,)))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_rank_takes_part_and_results_come_in_rank_order(ranks: RankPool, world_size: int) -> None:
    results = ranks.run(total, torch.ones(2), world_size=world_size)
    expected = world_size + world_size * (world_size - 1) / 2
    assert [value.tolist() for value, _ in results] == [[expected, expected]] * world_size
    assert len({pid for _, pid in results}) == world_size


@pytest.mark.slow
def test_processes_are_reused(ranks: RankPool) -> None:
    first = [pid for _, pid in ranks.run(total, torch.ones(1), world_size=2)]
    second = [pid for _, pid in ranks.run(total, torch.ones(1), world_size=3)]
    assert second[:2] == first


def test_a_raise_reports_rank_and_traceback_and_keeps_the_processes(ranks: RankPool) -> None:
    before = [pid for _, pid in ranks.run(total, torch.ones(1), world_size=2)]
    with pytest.raises(RankFailure, match="told to fail on 1") as caught:
        ranks.run(fail_on, 1, world_size=2)
    assert isinstance(caught.value.errors[1], ValueError)
    assert "in fail_on" in caught.value.tracebacks[1]
    assert not caught.value.timed_out
    assert [pid for _, pid in ranks.run(total, torch.ones(1), world_size=2)] == before


def test_nothing_leaks_into_the_next_call(ranks: RankPool) -> None:
    ranks.run(leave_traces)
    first, second = ranks.run(traces, process_group=False)
    assert (first["dtype"], first["grad"], first["group"]) == (torch.float32, True, False)
    assert first["random"] == second["random"]
    assert second["environment"] == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.slow
def test_a_dtensor_result_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="full_tensor"):
        ranks.run(returns_dtensor)


@pytest.mark.processes
def test_a_time_limit_shows_every_stack_and_the_pool_recovers() -> None:
    with RankPool() as pool:
        pool.run(total, torch.ones(1))
        with pytest.raises(RankFailure, match="rank 1 did not return within 1 s") as caught:
            pool.run(hang_on, 1, timeout=1)
        assert caught.value.timed_out
        assert "in hang_on" in str(caught.value)
        assert pool.run(total, torch.ones(1))[0][0].item() == 3


@pytest.mark.processes
def test_a_rank_that_dies_is_named_with_its_output() -> None:
    with RankPool() as pool:
        with pytest.raises(RankFailure, match="exit code 7") as caught:
            pool.run(die_on, 0)
        assert "last words" in str(caught.value)


def test_functions_that_cannot_be_imported_and_sizes_out_of_range_are_refused(ranks: RankPool) -> None:
    with pytest.raises(TypeError, match="top level of a test module"):
        ranks.run(lambda rank_info: None)
    with pytest.raises(ValueError, match="1 to 8"):
        ranks.run(total, torch.ones(1), world_size=9)


def test_fake_ranks_give_a_group_of_any_size(fake_ranks: Any) -> None:
    fake_ranks(16, rank=3)
    assert (dist.get_world_size(), dist.get_rank()) == (16, 3)
    dist.all_reduce(torch.ones(1))
