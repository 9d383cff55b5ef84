"""LoRA adapters: only they get gradients, only theirs are reduced, and they are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_steps
import parity
import pytest
import torch
import zoo
from pool import RankInfo, RankPool

import autosp

peft = pytest.importorskip("peft")
SP2 = {"sequence_parallel_size": 2, "autosp": {"inner_backend": "aot_eager"}}


def adapted() -> torch.nn.Module:
    torch.manual_seed(0)
    base = zoo.build("llama", num_hidden_layers=1)
    # Random adapters: with the usual zeros in B the gradient of A would be zero.
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False)
    return peft.get_peft_model(base, config)


def trained(rank_info: RankInfo, folder: str) -> dict[str, Any]:
    autosp.initialize(SP2)
    model = adapted()
    compiled = torch.compile(model, backend="autosp")
    found: dict[str, Any] = {
        "results": [
            parity.compare(model, compiled, zoo.batch(length), prepare=autosp.prepare_batch) for length in (16, 17)
        ]
    }
    loss = compiled(**autosp.prepare_batch(zoo.batch(16))).loss
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    found["reductions"] = sum(e.count for e in profile.key_averages() if e.key == "gloo:all_reduce")
    found["with gradient"] = sorted(n for n, p in model.named_parameters() if p.grad is not None)
    found["trainable"] = sorted(n for n, p in model.named_parameters() if p.requires_grad)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    model.zero_grad()
    if rank_info.rank == 0:
        compiled.save_pretrained(folder)
    torch.distributed.barrier()
    again = peft.PeftModel.from_pretrained(zoo.build("llama", num_hidden_layers=1), folder)
    with torch.no_grad():
        found["before"] = model(**zoo.batch(16)).loss.item()
        found["loaded"] = torch.compile(again, backend="autosp")(**autosp.prepare_batch(zoo.batch(16))).loss.item()
    return found


def test_adapters(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(trained, str(tmp_path), timeout=240):
        for result in found["results"]:
            result.check()
        assert found["with gradient"] == found["trainable"]
        assert len(found["trainable"]) == 6 and all("lora" in name for name in found["trainable"])
        assert found["reductions"] == 6
        assert found["loaded"] == pytest.approx(found["before"], rel=1e-5)


def test_the_script_of_the_page_runs_as_it_stands(ranks: RankPool, tmp_path: Path) -> None:
    script = tmp_path / "train_lora.py"
    script.write_text(engine_steps.script_of("peft"))
    results = ranks.run(engine_steps.run_script, str(script), world_size=2, process_group=False, timeout=240)
    assert results[0]["losses"] == results[1]["losses"] and results[0]["losses"][-1] < results[0]["losses"][0]
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
