"""The benchmark of the losses runs anywhere, computes what its peers compute, and refuses what it does not know."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import losses


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setitem(losses._COPY_BYTES, "cpu", 1 << 16)


def test_rows_and_table(tmp_path, capsys):
    target = tmp_path / "out.json"
    losses.main(
        ["--shapes", "3x24", "--dtypes", "float32", "--peers", "eager", "--device", "cpu", "--json", str(target)]
    )
    written = json.loads(target.read_text())
    assert {row["operator"] for row in written["results"]} == set(losses.PASSES)
    assert {row["implementation"] for row in written["results"]} == {"autosp", "eager"}
    for row in written["results"]:
        assert row["ms"] > 0 and row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
    floors = {row["operator"]: row["floor_ms"] for row in written["results"]}
    assert floors["jsd"] / floors["entropy"] == pytest.approx(7 / 3)
    printed = capsys.readouterr().out
    assert "device=cpu" in printed and "| 3 x 24 | float32 | jsd | autosp |" in printed


@pytest.mark.parametrize("operator", losses.PASSES)
def test_peers_compute_the_same(operator):
    x, y, t = torch.randn(3, 24), torch.randn(3, 24), torch.tensor([0, 5, 23])
    ours, theirs = (table[operator](x, y, t) for table in (losses.autosp_functions(), losses.eager_functions()))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="unknown operators"):
        losses.run(operators=("softmax",), device="cpu")
    with pytest.raises(ValueError, match="unknown peers"):
        losses.run(shapes=((2, 8),), peers=("other",), device="cpu")
