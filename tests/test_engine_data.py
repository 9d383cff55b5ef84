"""Loaders: one batch a sequence group, another in each data-parallel group, and where a resumed loop goes on."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_steps
import pytest
import torch
from pool import RankFailure, RankInfo, RankPool
from torch.utils.data import DataLoader, Dataset, IterableDataset

import autosp
from autosp.data import SequenceParallelLoader, check_batch, sequence_parallel_sampler

SP2 = {"sequence_parallel_size": 2}


class Augmented(Dataset[torch.Tensor]):
    """Sample ``i`` with noise from whichever generator the process has."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, int(torch.randint(1_000_000, ()))])


class Stream(IterableDataset[int]):
    def __init__(self, group: int) -> None:
        self.group = group

    def __iter__(self) -> Iterator[int]:
        yield from range(100 * self.group, 100 * self.group + 6)


class Stateful:
    """A loader with a state of its own, as torchdata's StatefulDataLoader has; it cannot be skipped through."""

    def __init__(self, group: int) -> None:
        self.group, self.at = group, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            yield 100 * self.group + self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def seen(rank_info: RankInfo) -> dict[str, Any]:
    state = autosp.initialize(SP2)
    dp = state.coordinates["dp"]
    torch.manual_seed(rank_info.rank)  # every rank draws other noise
    found: dict[str, Any] = {"dp": dp}
    for workers in (0, 1):
        sampler = sequence_parallel_sampler(Augmented(), seed=3)
        loader = SequenceParallelLoader(
            DataLoader(Augmented(), batch_size=2, sampler=sampler, num_workers=workers), seed=5
        )
        epochs = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            epochs.append(lists(loader))
        found[f"workers {workers}"] = epochs
    loader.set_epoch(1)  # without it another pass of the epoch would begin, with noise of its own
    iterator = iter(loader)
    next(iterator), next(iterator)
    position = loader.state_dict()
    iterator.close()
    again = SequenceParallelLoader(
        DataLoader(Augmented(), batch_size=2, sampler=sequence_parallel_sampler(Augmented(), seed=3), num_workers=1),
        seed=5,
    )
    again.load_state_dict(position)
    found["resumed"], found["taken"] = lists(again), again.taken
    found["length"] = len(again)
    found["stream"] = lists(SequenceParallelLoader(DataLoader(Stream(dp), batch_size=3)))
    found["stateful"] = stateful(dp)
    return found


def shuffled(generator: str, seed: int) -> SequenceParallelLoader:
    """A loader in random order, by a generator of its own or by the process's."""
    torch.manual_seed(seed)
    own = torch.Generator().manual_seed(seed) if generator == "own" else None
    numbers: Any = list(range(12))
    return SequenceParallelLoader(DataLoader(numbers, batch_size=2, shuffle=True, generator=own))


def resumed_order(rank_info: RankInfo) -> dict[str, Any]:
    """A shuffled loader in one data-parallel group, resumed after two batches of its second pass; every rank has a seed
    of its own, and another one after the resume.
    """
    autosp.initialize(SP2)
    found: dict[str, Any] = {}
    for name in ("process", "own"):
        loader = shuffled(name, rank_info.rank)
        found[f"{name} first"] = lists(loader)
        iterator = iter(loader)
        taken = [next(iterator).tolist(), next(iterator).tolist()]
        position = loader.state_dict()
        found[f"{name} second"] = taken + lists(iterator)
        again = shuffled(name, rank_info.rank)
        torch.manual_seed(77 + rank_info.rank)
        again.load_state_dict(position)
        found[f"{name} resumed"] = taken + lists(again)
        found[f"{name} third"], found[f"{name} third resumed"] = lists(loader), lists(again)
    return found


def test_a_shuffled_loader_goes_on_in_the_same_order(ranks: RankPool) -> None:
    for found in ranks.run(resumed_order):
        for name in ("process", "own"):
            assert found[f"{name} resumed"] == found[f"{name} second"] != found[f"{name} first"]
            assert found[f"{name} third resumed"] == found[f"{name} third"] != found[f"{name} second"]
            assert sorted(n for batch in found[f"{name} resumed"] for n in batch) == list(range(12))


def stateful(dp: int) -> list[int]:
    loader = SequenceParallelLoader(Stateful(dp))
    iterator = iter(loader)
    taken = [next(iterator), next(iterator)]
    again = SequenceParallelLoader(Stateful(dp))
    again.load_state_dict(loader.state_dict())
    return taken + list(again)


def test_a_group_sees_one_batch_and_each_group_another(ranks: RankPool) -> None:
    found = ranks.run(seen, world_size=4)
    for key in ("workers 0", "workers 1", "resumed", "stream", "stateful"):
        assert found[0][key] == found[1][key] and found[2][key] == found[3][key], key
        assert found[0][key] != found[2][key], key
    for workers in ("workers 0", "workers 1"):
        first, second = ([row[0] for batch in epoch for row in batch] for epoch in found[0][workers])
        other = [row[0] for batch in found[2][workers][0] for row in batch]
        assert sorted(first + other) == list(range(12))  # the groups split the data
        assert first != second  # a new order each epoch
    # Workers draw the same noise again after a resume; the batch after the two that were taken is the next one.
    assert found[0]["resumed"] == found[0]["workers 1"][1][2:]
    assert found[0]["taken"] == found[0]["length"] == 3
    noise = [{row[1] for batch in found[rank]["workers 1"][0] for row in batch} for rank in (0, 2)]
    assert not noise[0] & noise[1]
    assert found[2]["stateful"] == [101, 102, 103, 104, 105]


class CutByItself(torch.utils.data.Sampler[list[int]]):
    """A batch sampler that gives each group samples of its own."""

    def __init__(self, group: int) -> None:
        self.group = group

    def __iter__(self) -> Iterator[list[int]]:
        yield [6 * self.group, 6 * self.group + 1]


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        raise KeyError(f"no sample {index}")


def caught(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def failures(rank_info: RankInfo) -> dict[str, str]:
    found = {"no state": caught(lambda: SequenceParallelLoader([]))}
    state = autosp.initialize(SP2)
    found["sampler"] = caught(lambda: SequenceParallelLoader(DataLoader(Augmented(), shuffle=True)))
    world = torch.utils.data.DistributedSampler(Augmented())  # type: ignore[arg-type]
    found["world"] = caught(lambda: SequenceParallelLoader(DataLoader(Augmented(), sampler=world)))
    found["length"] = caught(lambda: sequence_parallel_sampler(Stream(0)))  # type: ignore[arg-type]
    found["foreign state"] = caught(lambda: SequenceParallelLoader([]).load_state_dict({"epoch": 1}))
    batches = torch.utils.data.BatchSampler(world, 2, drop_last=False)
    found["world batches"] = caught(lambda: SequenceParallelLoader(DataLoader(Augmented(), batch_sampler=batches)))
    mine = CutByItself(state.coordinates["dp"])
    found["custom"] = caught(lambda: list(SequenceParallelLoader(DataLoader(Augmented(), batch_sampler=mine))))
    # Batches that are no trees of tensors: long ones, alike at both ends, are told apart.
    long = torch.arange(3000)
    long[1500] += state.coordinates["dp"]
    for name, batch in (("mapping", UserDict(x=long)), ("array", long.numpy()), ("object", [object(), long])):
        found[name] = caught(lambda batch=batch: check_batch(batch))
    sampler = sequence_parallel_sampler(Failing())
    found["reading"] = caught(lambda: list(SequenceParallelLoader(DataLoader(Failing(), sampler=sampler), check=False)))
    found["twice"] = caught(lambda: list(SequenceParallelLoader([torch.ones(2)])))
    found["repeats"] = caught(lambda: list(SequenceParallelLoader([torch.ones(2)], check=False)))
    found["torn"] = caught(lambda: check_batch({"x": torch.tensor(rank_info.rank)}))
    found["right"] = caught(lambda: check_batch({"x": torch.tensor(state.coordinates["dp"]), "name": "a"}))
    empty = [] if state.coordinates["dp"] else [1]
    found["empty group"] = caught(lambda: list(SequenceParallelLoader(empty)))
    return found


def test_what_is_wrong_is_said_on_every_rank(ranks: RankPool) -> None:
    for found in ranks.run(failures, world_size=4):
        assert "call autosp.initialize(config) first" in found["no state"]
        assert "2 data-parallel groups, but the loader's RandomSampler gives each of them the whole" in found["sampler"]
        assert "DistributedSampler splits the dataset into 4 parts" in found["world"]
        assert "a Stream has no length" in found["length"]
        assert "no state of a SequenceParallelLoader" in found["foreign state"]
        assert found["reading"].startswith("KeyError: 'no sample")
        assert "2 data-parallel groups hold 1 different batches" in found["twice"]
        assert "data-parallel groups [0, 1] hold different batches" in found["torn"]
        assert "DistributedSampler splits the dataset into 4 parts" in found["world batches"]
        assert {found[name] for name in ("custom", "mapping", "array", "object")} == {"nothing raised"}
        assert found["repeats"] == found["right"] == found["empty group"] == "nothing raised"


def one_group(rank_info: RankInfo) -> str:
    autosp.initialize(SP2)
    world = torch.utils.data.DistributedSampler(Augmented())  # type: ignore[arg-type]
    return caught(lambda: SequenceParallelLoader(DataLoader(Augmented(), sampler=world)))


def test_a_sampler_over_the_world_is_refused_where_there_is_one_group(ranks: RankPool) -> None:
    # The group's first rank alone reads: half of the data would never be seen.
    for found in ranks.run(one_group):
        assert "1 data-parallel group, but the loader's DistributedSampler splits the dataset into 2 parts" in found


def leaves_early(rank_info: RankInfo) -> None:
    autosp.initialize({"autosp": {"verify_timeout": 2.0}})
    for number, _ in enumerate(SequenceParallelLoader(range(5))):
        if rank_info.rank == 1 and number == 2:
            torch.distributed.barrier()
    torch.distributed.barrier()


def test_a_rank_that_takes_fewer_batches_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="did not all ask for a batch within 2 s"):
        ranks.run(leaves_early, timeout=60)


def test_without_a_group_it_is_the_loader() -> None:
    state = autosp.initialize({"sequence_parallel_size": 1})
    try:
        loader = SequenceParallelLoader(DataLoader(range(5), batch_size=2), state=state)  # type: ignore[arg-type]
        assert lists(loader) == [[0, 1], [2, 3], [4]]
        check_batch(torch.ones(1), state=state)
    finally:
        autosp.mesh.reset()  # type: ignore[attr-defined]


def test_the_script_of_the_page_runs_as_it_stands(ranks: RankPool, tmp_path: Path) -> None:
    script = tmp_path / "read_data.py"
    script.write_text(engine_steps.script_of("data"))
    found = ranks.run(engine_steps.run_script, str(script), world_size=4, process_group=False)
    assert found[0] == found[1] and found[2] == found[3] and found[0] != found[2]
    rows = [row for rank in (0, 2) for batch in [found[rank]["first"], *found[rank]["rest"]] for row in batch]
    assert sorted(rows) == torch.arange(96).reshape(12, 8).tolist()
