"""`benchmarks/timeline.py`: which kernels belong to a layer, what they are for, and that a picture comes of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    import benchmarks.timeline

    return benchmarks.timeline


def trace_of(layers: int, file: Path) -> Path:
    """Forward and backward of so many layers: a product, an exchange, attention, an exchange, 1 ms each."""
    names = ["nvjet_sm90_x", "ncclDevKernel_SendRecv(x)", "cudnn_sdpa_sm90_flash_fprop", "ncclDevKernel_SendRecv(x)"]
    kernels = [
        {"cat": "kernel", "name": name, "ts": 5e6 + 1e3 * number, "dur": 1e3}
        for number, name in enumerate(names * layers * 2)
    ]
    other = {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9e9}
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": [other, *reversed(kernels)]}).encode()))
    return file


def test_a_layer_forward_and_backward(script: Any, tmp_path: Path) -> None:
    trace = trace_of(4, tmp_path / "trace.json.gz")
    found = script.kernels(trace)
    assert [kernel["start"] for kernel in found] == list(range(32))
    assert [script.kind(kernel["name"])[0] for kernel in found[:3]] == [
        "matrix products", "exchange of attention", "attention",
    ]  # fmt: skip
    assert script.windows(found) == {"forward of one layer": (8.0, 13.0), "backward of one layer": (24.0, 29.0)}
    script.draw(trace, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_too_few_layers(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="8 exchanges of attention"):
        script.windows(script.kernels(trace_of(2, tmp_path / "trace.json.gz")))
