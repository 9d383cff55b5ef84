"""`benchmarks/plan_error.py`: what it compares and says, with measured peaks that are given, and that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autosp.cli import launch

ROOT = Path(__file__).parent.parent
GIB = 2**30


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    import benchmarks.plan_error

    return benchmarks.plan_error


def test_the_error_is_relative_to_what_was_measured(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []

    def planned(case: Any, config: Path, tokens: int) -> list[str]:
        if case.tp > 1:
            return [sys.executable, "-c", "raise SystemExit('autosp: error: no such plan')"]
        rows = [{"bytes": 11.0 * GIB, "parts": {"weights": 1.0}}]
        return [sys.executable, "-c", f"print({json.dumps(json.dumps({'rows': rows}))})"]

    def measured(module: str, file: str, *, nproc: int, debug: bool) -> tuple[dict[int, Any], None]:
        settings = json.loads(Path(file).read_text())
        asked.append({**settings, "nproc": nproc, "model": json.loads(Path(settings["config"]).read_text())})
        if settings["checkpoint"]:
            failure = type("Failure", (), {"exitcode": 1, "message": {"message": "out of memory"}, "timestamp": 0})()
            return {0: failure}, None
        Path(settings["result"]).write_text(json.dumps({"peak": 10 * GIB, "loss": 5.5}))
        return {}, None

    monkeypatch.setattr(script, "plan_command", planned)
    monkeypatch.setattr(launch, "run_ranks", measured)
    names = ["llama", "llama, checkpointing", "llama, tp 2", "qwen3"]
    file = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--json", str(file), *[part for name in names for part in ("--case", name)]]
    assert script.main(arguments) == 1
    shown = capsys.readouterr().out
    assert "| llama | 64 | 1 | 11.00 | 10.00 | +10.0% |  |" in shown
    assert "| llama, checkpointing | 64 | 1 | 11.00 | - | - | measuring: " in shown and "out of memory" in shown
    assert "| llama, tp 2 | 64 | 2 | - | 10.00 | - | plan: autosp: error: no such plan  |" in shown
    written = json.loads(file.read_text())
    assert [row["case"] for row in written["rows"]] == names and written["environment"]["device"] == "cpu"
    assert written["rows"][0]["error_percent"] == pytest.approx(10)
    assert [one["nproc"] for one in asked] == [1, 1, 2, 1]
    assert asked[3]["model"]["model_type"] == "qwen3" and asked[0]["model"]["use_cache"] is False
    assert script.main(["--device", "cpu", "--case", "qwen3"]) == 0
    asked.clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert script.main(["--one-rank", "--case", "llama, sp 2", "--case", "qwen3"]) == 0
    assert [(one["nproc"], one["sp"], one["one_rank"]) for one in asked] == [(1, 2, True), (1, 1, False)]


def test_every_case_is_planned_as_it_is_measured(script: Any) -> None:
    for name, case in script.CASES.items():
        words = script.plan_command(case, Path("c.json"), 64)
        value = {option: words[words.index(option) + 1] for option in ("--gpus", "--sp", "--tp", "--seq-len")}
        assert value == {
            "--gpus": str(case.gpus),
            "--sp": str(case.sp),
            "--tp": str(case.tp),
            "--seq-len": "64",
        }
        assert ("--checkpoint" in words) == case.checkpoint == ("checkpointing" in name)
        assert ("--fuse-loss" in words) == case.fused == ("fused" in name)


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    names = ["llama, checkpointing, loss fused", "qwen3", "llama, sp 2", "llama, tp 2"]
    file = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.plan_error", "--device", "cpu", "--json", str(file)]
        + [part for name in names for part in ("--case", name)],
        cwd=ROOT, capture_output=True, text=True, timeout=500, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == names and all(row["planned"] > 0 and row["measured"] is None for row in rows.values())
    alone = [sys.executable, "-m", "benchmarks.plan_error", "--device", "cpu", "--one-rank", "--case", "llama, tp 2"]
    done = subprocess.run(alone, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "| llama, tp 2 | 64 | 2 |" in done.stdout, done.stderr
    # the same model and batch, shared or not: nothing but rounding is between them
    assert rows["llama, sp 2"]["loss"] == pytest.approx(rows["llama, tp 2"]["loss"], rel=1e-2)
