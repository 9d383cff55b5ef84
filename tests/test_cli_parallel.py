"""The collectives of `autosp train`'s own loop, on real ranks."""

from __future__ import annotations

import pytest
import torch
from pool import RankFailure, RankInfo, RankPool

from autosp.cli.parallel import Parallel, start
from autosp.errors import ConfigError, RankMismatchError


def average(info: RankInfo, config: dict) -> tuple[torch.Tensor | None, ...]:
    """Gradients of three parameters after averaging: one everywhere, one in the last group only, one nowhere."""
    parallel = start(config, device="cpu")
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(2)) for name in ("all", "some", "none")})
    model["all"].grad = torch.full((2,), float(parallel.dp_rank + 1))
    if parallel.dp_rank == parallel.dp_size - 1:
        model["some"].grad = torch.full((2,), 6.0)
    parallel.average_gradients(model)
    return tuple(model[name].grad for name in ("all", "some", "none"))


def test_gradients_are_averaged_over_data_parallel_groups_only(ranks: RankPool) -> None:
    for everywhere, some, none in ranks.run(average, {"data_parallel_size": 2}, world_size=4):
        assert everywhere.tolist() == [1.5, 1.5]
        assert some.tolist() == [3.0, 3.0]
        assert none is None
    for everywhere, _, none in ranks.run(average, {"sequence_parallel_size": 2}, world_size=2):
        assert everywhere.tolist() == [1.0, 1.0]
        assert none is None


def start_equal(info: RankInfo) -> tuple[list[float], list[list[float]], str, list[int]]:
    parallel = start({}, device="cpu")
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(float(info.rank + 5))
        model.bias.fill_(float(info.rank))
    parallel.broadcast_parameters(model)
    values = [float(value) for value in model.parameters()]
    return (
        values,
        parallel.exchange([info.rank, 0.5]).tolist(),
        parallel.from_first(f"from {info.rank}"),
        [*parallel.gather(info.rank)],
    )


def test_ranks_start_equal_and_know_each_other(ranks: RankPool) -> None:
    for values, exchanged, text, gathered in ranks.run(start_equal, world_size=2):
        assert values == [5.0, 0.0]
        assert exchanged == [[0.0, 0.5], [1.0, 0.5]]
        assert text == "from 0"
        assert gathered == [0, 1]


def place(dp_size: int, world: int) -> Parallel:
    return Parallel(
        rank=0,
        world=world,
        device=torch.device("cpu"),
        dp_size=dp_size,
        dp_rank=0,
        dp_group=None,
        sp_size=world // dp_size,
        control=None,
    )


def test_different_losses_inside_a_sequence_group_are_refused() -> None:
    place(2, 4).check_same_loss(torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64))
    with pytest.raises(RankMismatchError, match="different losses"):
        place(2, 4).check_same_loss(torch.tensor([1.0, 1.0, 2.0, 2.001], dtype=torch.float64))


def split_vocabulary(info: RankInfo) -> None:
    start({"tensor_parallel": {"autotp_size": 2}}, device="cpu")


def test_a_vocabulary_axis_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as failed:
        ranks.run(split_vocabulary, world_size=2)
    assert all(isinstance(error, ConfigError) for error in failed.value.errors.values())
    assert "splits the sequence only" in str(failed.value.errors[0])
