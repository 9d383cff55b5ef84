"""Settings that people give a Trainer, each on one process and on sequence groups: every logged number is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from pool import RankInfo, RankPool
from torch.utils.data import IterableDataset

import autosp

LENGTH = 17


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Samples one after the other, without a length."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from self.rows


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, 128, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = torch.where(rows < 40, -100, rows)
    return [{"input_ids": ids, "labels": target} for ids, target in zip(rows, labels, strict=True)]


SETTINGS: dict[str, dict[str, Any]] = {
    # With evaluation in the middle of training, so that the model is switched between train and eval.
    "many": {
        "gradient_checkpointing": True,
        "dataloader_num_workers": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "include_num_input_tokens_seen": "all",
        "max_grad_norm": 0.05,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
    },
    "bf16": {"bf16": True, "max_steps": 2},
    "adapters": {"max_steps": 3},
    # 7 samples in batches of 2: the last one of an epoch is short, and accumulation ends early there.
    "uneven": {"num_train_epochs": 2, "gradient_accumulation_steps": 3},
}


def logged(rank_info: RankInfo, name: str, folder: str) -> dict[str, Any]:
    import accelerate
    from transformers import Trainer, TrainingArguments

    from autosp.integrations.transformers import SequenceParallelTrainerMixin

    class SequenceParallelTrainer(SequenceParallelTrainerMixin, Trainer):
        pass

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    state = autosp.initialize(
        {"sequence_parallel_size": min(2, rank_info.world_size), "autosp": {"inner_backend": "aot_eager"}}
    )
    model = zoo.build("llama", num_hidden_layers=1, attention_dropout=0.0)
    train: Any = samples(7 if name == "uneven" else 16)
    if name == "adapters":
        from test_engine_peft import adapted

        model, train = adapted(), Stream(train)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=2 // state.sizes["dp"],
        per_device_eval_batch_size=4 // state.sizes["dp"],
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **SETTINGS[name],
    )
    # 8: Accelerate fills up the last batch of an uneven number, for any number of processes, with samples seen before.
    trainer = SequenceParallelTrainer(model, arguments, train_dataset=train, eval_dataset=samples(8))
    trainer.train()
    kept = ("loss", "grad_norm", "eval_loss", "num_input_tokens_seen", "epoch", "learning_rate")
    found: dict[str, Any] = {
        "log": [{key: row[key] for key in kept if key in row} for row in trainer.state.log_history],
        "batch": trainer.get_total_train_batch_size(arguments),
        "flos": trainer.state.total_flos,
        "trained": sorted(n for n, p in model.named_parameters() if p.requires_grad),
    }
    if name == "adapters":
        trainer.save_model(folder)
    return found


@pytest.mark.parametrize(
    ("name", "world_size", "rtol"),
    [
        ("adapters", 4, 2e-5),
        pytest.param("many", 4, 2e-5, marks=pytest.mark.slow),
        pytest.param("uneven", 2, 2e-5, marks=pytest.mark.slow),
        pytest.param("bf16", 2, 3e-2, marks=pytest.mark.slow),
    ],
)
def test_what_is_logged_is_what_one_process_logs(
    ranks: RankPool, tmp_path: Any, name: str, world_size: int, rtol: float
) -> None:
    (expected,) = ranks.run(logged, name, str(tmp_path / "one"), world_size=1, timeout=300)
    assert sum("loss" in row for row in expected["log"]) >= 2
    for found in ranks.run(logged, name, str(tmp_path / "many"), world_size=world_size, timeout=300):
        assert len(found["log"]) == len(expected["log"])
        for row, want in zip(found["log"], expected["log"], strict=True):
            assert row == pytest.approx(want, rel=rtol), (row, want)
        assert found["batch"] == expected["batch"]
        assert found["flos"] == pytest.approx(expected["flos"])
        assert found["trained"] == expected["trained"]
    if name == "adapters":
        assert all("lora" in parameter for parameter in expected["trained"])
        assert (tmp_path / "many" / "adapter_model.safetensors").exists()
