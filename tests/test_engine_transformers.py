"""One Trainer script on one process and on sequence groups: every logged loss, evaluation, predictions, resuming."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import engine_steps
import pytest
import torch
import zoo
from pool import RankInfo, RankPool

import autosp

SP2 = {"sequence_parallel_size": 2, "autosp": {"inner_backend": "aot_eager"}}


@pytest.fixture(scope="module")
def script_text() -> str:
    return engine_steps.script_of("transformers")


def run(ranks: RankPool, folder: Path, text: str, world_size: int) -> list[dict[str, Any]]:
    folder.mkdir()
    script = folder / "train_trainer.py"
    script.write_text(text)
    return ranks.run(engine_steps.run_script, str(script), world_size=world_size, process_group=False, timeout=300)


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(expected["losses"]) == 4 and len(set(expected["losses"])) == 4
    for key in ("losses", "norms", "eval_loss"):
        assert found[key] == pytest.approx(expected[key], rel=2e-5), key
    assert found["resumed"][-2:] == pytest.approx(found["losses"][-2:], rel=2e-5)
    got, want = torch.tensor(found["predictions"]), torch.tensor(expected["predictions"])
    assert got.shape == want.shape == (7, 17, 64)
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("world_size", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_the_script_of_the_page_logs_what_one_process_logs(
    ranks: RankPool, tmp_path: Path, script_text: str, world_size: int
) -> None:
    (expected,) = run(ranks, tmp_path / "one", script_text, 1)
    for found in run(ranks, tmp_path / "many", script_text, world_size):
        check(found, expected)


def refused(rank_info: RankInfo) -> dict[str, str]:
    import accelerate
    from transformers import Trainer, TrainingArguments

    from autosp.integrations.transformers import SequenceParallelAccelerator, SequenceParallelTrainerMixin

    class Mixed(SequenceParallelTrainerMixin, Trainer):
        pass

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    found: dict[str, str] = {}
    record = engine_steps.recorder(found)

    def trainer(model: Any = None, **arguments: Any) -> Mixed:
        settings = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], **arguments)
        return Mixed(zoo.build("llama", num_hidden_layers=1) if model is None else model, settings)

    record("no state", trainer)
    autosp.initialize(SP2)
    record("smoothing", lambda: trainer(label_smoothing_factor=0.1))
    before = dict(os.environ)
    record("compile", lambda: trainer(torch_compile=True))  # leaves settings in the environment
    for name in set(os.environ) - set(before):
        del os.environ[name]
    record("compiled", lambda: trainer(torch.compile(zoo.build("llama", num_hidden_layers=1))))
    configuration = accelerate.DataLoaderConfiguration(dispatch_batches=True)
    record("dispatch", lambda: SequenceParallelAccelerator(cpu=True, dataloader_config=configuration))
    return found


def test_what_would_be_wrong_is_refused(ranks: RankPool) -> None:
    for found in ranks.run(refused):
        assert "call autosp.initialize(config) first" in found["no state"]
        assert "label_smoothing_factor=0.1 would be wrong with sequence groups" in found["smoothing"]
        assert "torch_compile=True" in found["compile"]
        assert "the model is compiled already" in found["compiled"]
        assert "dispatch_batches hands each rank another slice" in found["dispatch"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fsdp", True),
        ("deepspeed", {"zero_optimization": {"stage": 2}}),
        ("auto_find_batch_size", True),
        ("train_sampling_strategy", "batch_rebalance"),
    ],
)
def test_an_argument_of_another_engine_is_refused(name: str, value: Any) -> None:
    from transformers import TrainingArguments

    from autosp.integrations.transformers import _check_arguments

    arguments = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    _check_arguments(arguments)
    setattr(arguments, name, value)  # some of them change the process when they are set by the constructor
    with pytest.raises(autosp.ConfigError, match=name):
        _check_arguments(arguments)


def accelerated(rank_info: RankInfo) -> dict[str, Any]:
    """A loop of one's own with the accelerator."""
    import accelerate
    from torch.utils.data import DataLoader

    from autosp.integrations.transformers import SequenceParallelAccelerator

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    state = autosp.initialize(SP2)
    accelerator = SequenceParallelAccelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(range(10), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    found: dict[str, Any] = {"dp": state.coordinates["dp"], "seen": [], "metrics": [], "objects": []}
    for batch in loader:
        found["seen"] += batch.tolist()
        found["metrics"] += accelerator.gather_for_metrics(batch).tolist()
        found["objects"] += accelerator.gather_for_metrics([f"{n}" for n in batch.tolist()], use_gather_object=True)
    found["all"] = accelerator.gather(torch.tensor([rank_info.rank])).tolist()
    return found


def test_the_accelerator_splits_data_over_groups(ranks: RankPool) -> None:
    found = ranks.run(accelerated, world_size=4)
    assert found[0]["seen"] == found[1]["seen"] and found[2]["seen"] == found[3]["seen"]
    for one in found:
        assert sorted(one["metrics"]) == list(range(10))  # the sample that fills up the last batch is cut off
        assert sorted(map(int, one["objects"])) == list(range(10))
        assert one["all"] == [0, 1, 2, 3]
