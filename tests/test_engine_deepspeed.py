"""DeepSpeed's own engine: all three JSONs, ZeRO 0 to 2, two steps equal one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_steps
import pytest
import torch
import torch.distributed as dist
import toys
from engine_steps import Run
from pool import RankInfo, RankPool

import autosp
from autosp import mesh

pytest.importorskip("deepspeed")

JSONS = {
    "size alone": {"sequence_parallel_size": 2},
    "both sizes": {"sequence_parallel_size": 2, "data_parallel_size": 2},
    "mesh_param": {"mesh_param": [2, 2]},
}
REST = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "autosp": {"inner_backend": "aot_eager"},
}


@pytest.fixture
def fresh_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    """DeepSpeed keeps the first process group that it sees for good, so each test has processes of its own."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with RankPool() as pool:
        yield pool


def without_compiled_collectives() -> None:
    """DeepSpeed compiles C++ collectives when it starts on a CPU, half a minute of it; only its inference uses them."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def run_script(rank_info: RankInfo, path: str) -> dict[str, Any]:
    without_compiled_collectives()
    return engine_steps.run_script(rank_info, path)


def engine_of(model: torch.nn.Module, sizes: dict[str, Any], stage: int, **more: Any) -> Any:
    from autosp.integrations import deepspeed

    without_compiled_collectives()
    config = {**REST, **sizes, "zero_optimization": {"stage": stage}, **more}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    return engine


def probe(sizes: dict[str, Any], stage: int) -> float:
    """Rank r has gradient 10^r; SGD with lr 1. The mean over four ranks is 277.75."""
    from autosp.integrations import deepspeed

    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    config = {**REST, **sizes, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    # There are no tokens here: what the engine makes of gradients is all that is looked at.
    engine.module._compiled_call_impl = None
    engine.backward(engine(torch.full((1, 1), 10.0 ** dist.get_rank())).sum())
    engine.step()
    return -engine.module.weight.item()


def steps(engine: Any, model: torch.nn.Module) -> Run:
    run = Run()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(2):
        loss = engine(**autosp.prepare_batch(engine_steps.batch_of(step, 0, dist.get_rank() // 2))).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        run.losses.append(total.item() / dist.get_world_size())
    run.moved = {n: p.detach() - before[n] for n, p in model.named_parameters()}
    return run


def trained(rank_info: RankInfo, cases: list[tuple[str, int]], clip: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, stage in cases:
        mesh.reset()
        model = toys.build()
        engine = engine_of(model, JSONS[name], stage, gradient_clipping=clip)
        found[f"{name}, ZeRO {stage}"] = steps(engine, model)
        found[f"probe {name}, ZeRO {stage}"] = probe(JSONS[name], stage)
    return found


def check(found: dict[str, Any], clip: float | None = None) -> None:
    expected = engine_steps.one_process(toys.build(), replicas=2, clip=clip)
    for name, run in found.items():
        if name.startswith("probe"):
            assert run == pytest.approx(277.75), name
        else:
            run.gradients = expected.gradients  # the engine keeps them to itself; two steps tell
            run.norms = expected.norms
            run.check(expected)


def test_jsons_and_stages_train_right(fresh_ranks: RankPool) -> None:
    """A stage without and one with sharded gradients; every JSON with every stage is in the slow tier."""
    cases = [("size alone", 0), ("mesh_param", 2)]
    for found in fresh_ranks.run(trained, cases, 0.0, world_size=4, timeout=340):
        assert len(found) == 4
        check(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(JSONS))
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_every_json_with_every_stage(fresh_ranks: RankPool, name: str, clip: float) -> None:
    for found in fresh_ranks.run(trained, [(name, stage) for stage in range(3)], clip, world_size=4, timeout=340):
        check(found, clip or None)


def compiled_by_the_engine(rank_info: RankInfo) -> Run:
    """``engine.compile(backend="autosp")`` on top: the setting of the JSON holds then."""
    mesh.reset()
    model = toys.build()
    engine = engine_of(model, JSONS["both sizes"], 1)
    engine.compile(backend="autosp")
    return steps(engine, model)


@pytest.mark.slow
def test_compiled_by_the_engine(fresh_ranks: RankPool) -> None:
    for run in fresh_ranks.run(compiled_by_the_engine, world_size=4, timeout=300):
        check({"engine.compile": run})


class Groups:
    """An mpu."""

    def __init__(self, sp: int) -> None:
        self.sp = sp

    def get_sequence_parallel_world_size(self) -> int:
        return self.sp


def with_groups_of_ones_own(rank_info: RankInfo) -> Run:
    """An mpu whose sizes are those of the JSON, and gradients that the engine scales before it sums them."""
    from autosp.integrations import deepspeed

    without_compiled_collectives()
    mesh.reset()
    model = toys.build()
    config = {**REST, **JSONS["size alone"], "prescale_gradients": True, "gradient_predivide_factor": 2.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer, mpu=Groups(2))
    return steps(engine, model)


@pytest.mark.slow
def test_an_mpu_that_agrees_and_prescaled_gradients(fresh_ranks: RankPool) -> None:
    for run in fresh_ranks.run(with_groups_of_ones_own, world_size=4, timeout=300):
        check({"mpu": run})


def refusals(rank_info: RankInfo) -> dict[str, str]:
    from autosp.integrations import deepspeed

    found: dict[str, str] = {}

    def record(name: str, config: dict[str, Any], model: Any = None, **more: Any) -> None:
        mesh.reset()
        if name == "other mesh":
            autosp.initialize({"sequence_parallel_size": 1})
        try:
            deepspeed.initialize(model=toys.build() if model is None else model, config={**REST, **config}, **more)
        except autosp.AutoSPError as error:
            found[name] = f"{type(error).__name__}: {error}"

    two = {"sequence_parallel_size": 2}
    record("stage 3", {**two, "zero_optimization": {"stage": 3}})
    record("stage as text", {**two, "zero_optimization": {"stage": "3"}})
    sgd = torch.optim.SGD(toys.build().parameters(), lr=0.5)
    record("fp16", {**two, "fp16": {"enabled": True}}, optimizer=sgd)
    adam = {"type": "Adam", "params": {"lr": 1e-3}}
    record("fp16 in the JSON", {**two, "fp16": {"enabled": True}, "zero_optimization": False, "optimizer": adam})
    record("sum", {**two, "gradient_allreduce_op": "sum"})
    record("deepcompile", {**two, "compile": {"deepcompile": True, "passes": ["z1"]}})
    record("data", two, training_data=[1])
    record("other mesh", two)
    record("mesh twice", {"mesh_param": [1, 2]}, mesh_param=(2, 1))
    record("mpu", two, mpu=Groups(1))
    record("mute mpu", two, mpu=object())
    record("mode", {**two, "autosp": {"gradient_reduction": "engine_sum"}})
    record("compiled", two, torch.compile(toys.build()))
    record("batch", {**two, "train_batch_size": 3})
    record("batch type", {**two, "train_micro_batch_size_per_gpu": "auto"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.__version_minor__", 18)
        record("version", two)
    record("vocabulary", {"sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 2}})
    return found


def test_what_would_be_wrong_is_refused(ranks: RankPool) -> None:
    for found in ranks.run(refusals, timeout=200):
        assert "zero_optimization.stage is 3, which is not supported" in found["stage 3"]
        assert found["stage as text"] == found["stage 3"]
        assert "fp16 is enabled without ZeRO" in found["fp16"] and found["fp16 in the JSON"] == found["fp16"]
        assert "gradient_allreduce_op is 'sum'" in found["sum"]
        assert "compile.deepcompile is on with passes ['z1']" in found["deepcompile"]
        assert "training_data is given" in found["data"]
        assert "sequence_parallel_size is 2 in the JSON, but the mesh of autosp.initialize has 1" in found["other mesh"]
        assert "mesh_param is [2, 1], in the JSON [1, 2]" in found["mesh twice"]
        assert "the mpu has 1 sequence parallel ranks, the mesh of autosp 2" in found["mpu"]
        assert "says nothing of sequence parallelism" in found["mute mpu"]
        assert "gradient_reduction is 'engine_sum'" in found["mode"]
        assert "the model is compiled already" in found["compiled"]
        assert "train_batch_size 3 is not train_micro_batch_size_per_gpu 2" in found["batch"]
        assert "train_micro_batch_size_per_gpu is 'auto'" in found["batch type"]
        assert "is installed; 0.19 or later is needed" in found["version"]
        assert "vocabulary axis of 2 ranks" in found["vocabulary"]


@pytest.mark.parametrize(
    ("given", "dp", "sizes"),
    [
        ({"train_batch_size": 8}, 2, (4, 1)),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, 2, (2, 2)),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 4}, 2, (1, 4)),
        ({"train_micro_batch_size_per_gpu": 3}, 2, (3, 1)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, 4, (3, 2)),
    ],
)
def test_batch_sizes_count_data_parallel_groups(given: dict[str, int], dp: int, sizes: tuple[int, int]) -> None:
    from autosp.integrations.deepspeed import _batch_sizes

    assert _batch_sizes(given, dp) == sizes


def test_the_script_of_the_page_runs_as_it_stands(tmp_path: Path, fresh_ranks: RankPool) -> None:
    script = tmp_path / "train_deepspeed.py"
    script.write_text(engine_steps.script_of("deepspeed"))
    (tmp_path / "ds_config.json").write_text(engine_steps.json_of("deepspeed"))
    results = fresh_ranks.run(run_script, str(script), world_size=4, process_group=False, timeout=300)
    assert all(result["losses"] == pytest.approx(results[0]["losses"], rel=1e-6) for result in results)
    assert results[0]["losses"][-1] < results[0]["losses"][0]
