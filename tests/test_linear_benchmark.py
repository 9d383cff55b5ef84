"""The benchmark of the fused losses runs at toy sizes, and draws what it measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parent.parent / "benchmarks" / "linear_loss.py"
    spec = importlib.util.spec_from_file_location("benchmark_linear_loss", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_rows_and_table(benchmark, tmp_path, capsys):
    names = ["F.linear + CE", *benchmark.own_methods()]
    chosen = [argument for name in names for argument in ("--only", name)]
    target = tmp_path / "rows.json"
    arguments = ["--shape", "16x8x50", "--device", "cpu", "--repeats", "1", "--json", str(target), *chosen]
    assert benchmark.main(arguments) == 0
    rows = json.loads(target.read_text())["rows"]
    assert [row["method"] for row in rows] == names
    assert all(row["ms"] > 0 and row["ratio"] > 0 and row["extra_gib"] is None for row in rows)
    text = capsys.readouterr().out
    assert all(f"| 16 x 8 x 50 | {name} |" in text for name in names)


def test_picture(benchmark, tmp_path):
    row = benchmark.Row(16, 8, 50, "autosp fast", 1.0, 0.5, 2.0, 1.5, 0.25)
    benchmark.draw([row], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    row.extra_gib = None
    with pytest.raises(SystemExit, match="run on a GPU"):
        benchmark.draw([row], tmp_path / "none.png")


def test_a_failing_peer_is_a_row_and_our_own_failure_is_not(benchmark):
    import torch

    def fails(x):
        raise RuntimeError("broken")

    inputs = benchmark.Inputs.random(4, 8, 10, torch.device("cpu"), torch.float32)
    row = benchmark.measure("Peer", fails, 3, inputs, (1e12, 1e12), 1)
    assert row.ms is None and row.note == "RuntimeError: broken"
    with pytest.raises(RuntimeError, match="broken"):
        benchmark.measure("autosp fast", fails, 3, inputs, (1e12, 1e12), 1)


def test_bad_arguments(benchmark):
    with pytest.raises(ValueError, match="no method"):
        benchmark.run(((4, 8, 10),), only=("nothing",), device="cpu")
    with pytest.raises(SystemExit):
        benchmark.main(["--shape", "4x8"])
