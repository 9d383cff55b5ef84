"""The mesh and its state, and the comparison between ranks: real gloo processes, and one test for every refusal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankInfo, RankPool
from torch.distributed import _functional_collectives as funcol

import autosp
from autosp import mesh as autosp_mesh
from autosp.config import AutoSPConfig
from autosp.errors import ConfigError, InputError, RankMismatchError
from autosp.mesh import AutoSPState, agree, current, select, use


@pytest.fixture(autouse=True)
def _fresh_state() -> Any:
    autosp_mesh.reset()
    yield
    autosp_mesh.reset()


def place(rank_info: RankInfo, tree: dict[str, Any]) -> dict[str, Any]:
    state = autosp.initialize(tree)
    assert current() is state
    sums = {}
    for axis in autosp_mesh.AXES:
        mine = torch.tensor([10.0**rank_info.rank])
        sums[axis] = int(funcol.all_reduce(mine, "sum", state.group_names[axis]).item())
    return {
        "names": state.mesh.mesh_dim_names if state.mesh else None,
        "sizes": dict(state.sizes),
        "coordinates": tuple(state.coordinates.values()),
        "ranks": dict(state.ranks),
        "sums": sums,
        "properties": (state.sp_size, state.sp_rank, state.sp_group == state.group_names["sp"], state.device_type),
        "check": dist.get_process_group_ranks(state.check_group) if state.check_group else None,
    }


def test_axes_lie_as_documented_and_their_groups_reduce_by_name(ranks: RankPool) -> None:
    results = ranks.run(place, {"sequence_parallel_size": 2, "data_parallel_size": 2}, world_size=4)
    assert results[0]["names"] == ("dp", "sp", "tp")
    assert results[0]["sizes"] == {"dp": 2, "sp": 2, "tp": 1}
    assert [result["coordinates"] for result in results] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert results[3]["ranks"] == {"dp": (1, 3), "sp": (2, 3), "tp": (3,)}
    assert results[2]["sums"] == {"dp": 101, "sp": 1100, "tp": 100}
    assert results[3]["properties"] == (2, 1, True, "cpu")
    assert [result["check"] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_the_vocabulary_axis_is_innermost(ranks: RankPool) -> None:
    results = ranks.run(place, {"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}}, world_size=4)
    assert [result["coordinates"] for result in results] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert results[1]["sums"] == {"dp": 10, "sp": 1010, "tp": 11}
    assert [result["check"] for result in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_initialize_starts_the_process_group_under_torchrun(ranks: RankPool) -> None:
    results = ranks.run(place, {}, world_size=3, process_group=False)
    assert [result["sums"]["sp"] for result in results] == [111, 111, 111]
    assert ranks.run(place, {}, world_size=1, process_group=False)[0]["check"] is None


def refused_before_start(rank_info: RankInfo) -> tuple[str, bool]:
    try:
        autosp.initialize({"sequence_parallel_size": 3})
    except ConfigError as error:
        return str(error), dist.is_initialized() or current() is not None
    return "", True


def test_a_mesh_that_does_not_cover_the_world_is_refused_and_nothing_is_started(ranks: RankPool) -> None:
    for message, started in ranks.run(refused_before_start, world_size=2, process_group=False):
        assert "sequence_parallel_size 3" in message and "do not cover a world of 2" in message
        assert not started


def test_without_a_process_group_everything_has_size_one(tmp_path: Path) -> None:
    assert current() is None and select() is None
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"autosp": {"inner_backend": "eager"}}))
    state = autosp.initialize(path)
    assert state.mesh is None and state.check_group is None and state.sp_group is None
    assert dict(state.sizes) == {"dp": 1, "sp": 1, "tp": 1}
    assert state.config.inner_backend == "eager"
    agree(state, "step", b"anything")
    autosp_mesh.reset()
    assert current() is None


def test_a_ready_config_is_taken_too() -> None:
    state = autosp.initialize(AutoSPConfig(inner_backend="eager"))
    assert (state.config.inner_backend, state.config.sequence_parallel_size) == ("eager", 1)
    with pytest.raises(ConfigError, match="do not cover a world of 1"):
        autosp.initialize(AutoSPConfig(sequence_parallel_size=2))
    assert current() is state


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="device_type is 'tpu'; allowed: 'cpu', 'cuda'"):
        autosp.initialize({}, device_type="tpu")
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        autosp.initialize({}, device_type="cuda")


def test_a_process_group_for_other_devices_is_refused(monkeypatch: pytest.MonkeyPatch, fake_ranks: Any) -> None:
    fake_ranks(2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(ConfigError, match="device_type is 'cpu', but the process group serves cuda only"):
        autosp.initialize({}, device_type="cpu")


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="local rank 3, but the machine has 2 CUDA devices"):
        autosp.initialize({})
    assert not dist.is_initialized()


def test_ranks_that_share_a_vocabulary_compare_notes_too(ranks: RankPool) -> None:
    tree = {"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}}
    assert [result["check"] for result in ranks.run(place, tree, world_size=4)] == [[0, 1, 2, 3]] * 4


def test_a_fake_group_of_any_size_gets_a_mesh(fake_ranks: Any) -> None:
    fake_ranks(16, rank=13)
    state = autosp.initialize({"sequence_parallel_size": 4, "tensor_parallel": {"autotp_size": 2}})
    assert dict(state.coordinates) == {"dp": 1, "sp": 2, "tp": 1}
    assert state.ranks["sp"] == (9, 11, 13, 15)
    assert state.check_group is None
    agree(state, "compile", b"nobody to compare with")


def two_meshes(rank_info: RankInfo) -> dict[str, Any]:
    first = autosp.initialize({"sequence_parallel_size": 2, "autosp": {"outputs": "full"}})
    second = autosp.initialize({"sequence_parallel_size": 4})
    assert current() is second
    with use(first) as inside:
        assert inside is first and current() is first and select() is first
    assert current() is second
    assert select({"mesh": first}) is first and select({"mesh": first.mesh}) is first
    changed = select({"mesh": first, "inner_backend": "eager"})
    assert changed is not None and changed.mesh is first.mesh and changed.config.outputs == "full"
    assert changed.config.inner_backend == "eager" and first.config.inner_backend == "inductor"
    agree(first, "compile", b"same")
    agree(second, "compile", b"same")
    mine = torch.tensor([10.0**rank_info.rank])
    return {str(state.sp_size): int(funcol.all_reduce(mine, "sum", state.sp_group)) for state in (first, second)}


def test_two_meshes_in_one_process(ranks: RankPool) -> None:
    results = ranks.run(two_meshes, world_size=4)
    assert results[0] == {"2": 11, "4": 1111}
    assert results[3] == {"2": 1100, "4": 1111}


def test_what_options_refuse() -> None:
    with pytest.raises(ConfigError, match="outputs is 'all'; allowed"):
        select({"outputs": "all"})
    assert select({"outputs": "full"}) is None
    autosp.initialize({})
    with pytest.raises(ConfigError, match=r"unknown 'output' in torch.compile\(options=...\)"):
        select({"output": "full"})
    with pytest.raises(ConfigError, match=r"options\['mesh'\] is a str that autosp.initialize did not build"):
        select({"mesh": "sp"})
    with pytest.raises(InputError, match="takes the state that autosp.initialize returns, not str"):
        use("sp").__enter__()  # type: ignore[arg-type]


def test_use_restores_the_state_after_an_error() -> None:
    first, second = autosp.initialize({}), autosp.initialize({})
    with pytest.raises(KeyError), use(first):
        raise KeyError
    assert current() is second


def compare(rank_info: RankInfo, kinds: dict[int, str], payloads: dict[int, Any], details: dict[int, str]) -> str:
    """What `agree` says on this rank; entries are by rank, -1 for all others."""

    def mine(table: dict[int, Any]) -> Any:
        return table.get(rank_info.rank, table[-1])

    state = autosp.initialize({"sequence_parallel_size": 3} if rank_info.world_size == 3 else {"mesh_param": [2, 2]})
    agree(state, "compile", b"equal")
    try:
        agree(state, mine(kinds), mine(payloads), detail=mine(details))
    except RankMismatchError as error:
        return str(error)
    agree(state, "step", b"equal again")
    return ""


def test_equal_payloads_agree(ranks: RankPool) -> None:
    assert ranks.run(compare, {-1: "step"}, {-1: {"a": b"1", "b": b""}}, {-1: ""}, world_size=3) == ["", "", ""]


def test_every_rank_learns_who_differs_and_in_what(ranks: RankPool) -> None:
    payloads = {-1: {"input_ids": b"1", "labels": b"2"}, 0: {"input_ids": b"9", "labels": b"2"}}
    details = {-1: "input_ids int64 (1, 8)", 0: ""}
    messages = ranks.run(compare, {-1: "step"}, payloads, details, world_size=3)
    assert len(set(messages)) == 1
    assert "ranks of the sequence group [0, 1, 2] were given different inputs for the same step:" in messages[0]
    assert "rank 0 differs from rank 1 in input_ids\n" in messages[0]
    assert "rank 2 differs" not in messages[0] and "labels" not in messages[0].split("must get")[0]
    assert "must get the same batch" in messages[0]
    assert "rank 2: input_ids int64 (1, 8)" in messages[0]


def test_entries_that_only_one_rank_has_are_named(ranks: RankPool) -> None:
    messages = ranks.run(compare, {-1: "compile"}, {-1: {"a": b"1"}, 2: {"a": b"1", "z": b"1"}}, {-1: ""}, world_size=3)
    assert all("compiled different programs" in m and "rank 2 differs from rank 0 in z" in m for m in messages)


def test_a_plain_payload_and_a_kind_of_ones_own(ranks: RankPool) -> None:
    messages = ranks.run(compare, {-1: "resume"}, {-1: b"1", 1: b"2"}, {-1: ""}, world_size=3)
    assert all("differ at 'resume':\n  rank 1 differs from rank 0" in message for message in messages)


def test_only_the_group_with_the_difference_raises(ranks: RankPool) -> None:
    messages = ranks.run(compare, {-1: "step"}, {-1: b"1", 3: b"2"}, {-1: ""}, world_size=4)
    assert messages[:2] == ["", ""]
    assert all("group [2, 3]" in message and "rank 3 differs from rank 2" in message for message in messages[2:])


def test_one_rank_compiles_while_another_steps(ranks: RankPool) -> None:
    messages = ranks.run(compare, {-1: "step", 1: "compile"}, {-1: b"1"}, {-1: ""}, world_size=3)
    assert len(set(messages)) == 1
    assert "rank 0 at 'step', rank 1 at 'compile', rank 2 at 'step'" in messages[0]
    assert "One rank compiles while another runs what it has compiled already" in messages[0]


def test_a_rank_that_refuses_does_not_keep_the_others_waiting(ranks: RankPool) -> None:
    messages = ranks.run(compare, {-1: "compile", 2: "refused"}, {-1: b"1"}, {-1: ""}, world_size=3)
    assert all("rank 2 at 'refused'" in m and "A rank refused what another accepts: they were" in m for m in messages)


def test_a_kind_that_is_no_short_word_is_refused() -> None:
    state = autosp.initialize({})
    for kind in ("", "x" * 33):
        with pytest.raises(InputError, match="a word of 1 to 32 bytes"):
            agree(state, kind, b"")


def stay_away(rank_info: RankInfo, how: str) -> tuple[str, float]:
    state = autosp.initialize({"autosp": {"verify_timeout": 2}})
    if rank_info.rank == 1:
        if how == "late":
            time.sleep(4)
        else:
            dist.destroy_process_group()
        return "", 0.0
    begin = time.monotonic()
    with pytest.raises(RankMismatchError) as caught:
        agree(state, "step", b"1")
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize("how", ["late", pytest.param("gone", marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_is_an_error_not_a_hang(ranks: RankPool, how: str) -> None:
    message, seconds = ranks.run(stay_away, how, timeout=60)[0]
    assert "rank 0 is at the 'step' check of its sequence group [0, 1]" in message
    assert "did not come within 2 s (verify_timeout) or has ended" in message
    assert seconds < 10


def with_model(rank_info: RankInfo, change: str) -> str:
    torch.manual_seed(rank_info.rank if change == "seed" else 0)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    model.register_buffer("flags", torch.ones(2, dtype=torch.bool))
    model.register_buffer("later", torch.zeros(2, device="meta"))
    if rank_info.rank == 1 and change == "dtype":
        model[2].to(torch.bfloat16)
    if rank_info.rank == 1 and change == "buffer":
        model.flags[0] = False  # type: ignore[index]
    before = current()
    try:
        state = autosp.initialize({}, model=model)
    except RankMismatchError as error:
        assert current() is before
        return str(error)
    assert isinstance(state, AutoSPState)
    return ""


@pytest.mark.parametrize(
    ("change", "differing"),
    [("none", None), ("seed", "0.weight, 2.bias, 2.weight"), ("dtype", "2.bias, 2.weight"), ("buffer", "flags")],
)
def test_a_model_that_differs_within_the_group_is_refused(ranks: RankPool, change: str, differing: str | None) -> None:
    for message in ranks.run(with_model, change):
        if differing is None:
            assert message == ""
        else:
            assert "hold different models" in message
            assert f"rank 1 differs from rank 0 in {differing}\n" in message
