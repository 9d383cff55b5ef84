"""Figures of the fused head that stand on several pages are those of the page that has them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHAPES = ["8192 x 4096 x 128256", "16384 x 4096 x 131072", "8192 x 2304 x 256000"]
COLUMNS = {"fast": 3, "main_grad": 4, "lean": 5, "none": 6, "logprobs": 7, "KL": 8}


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip(" *") for cell in line.strip().strip("|").split("|")]


def measured(shape: str) -> dict[str, list[str]]:
    """Method -> ms, ratio to the GEMMs alone, ratio to the burst floor, GiB."""
    tokens, hidden, vocabulary = shape.split(" x ")
    head = f"### {tokens} tokens, hidden {hidden}, vocabulary {vocabulary}"
    (section,) = re.findall(rf"^{head}\n(.*?)(?=^#|^!)", text("docs/benchmarks_linear_loss.md"), re.M | re.S)
    rows = [cells(line) for line in section.splitlines() if line.startswith("|")][2:]
    return {row[0]: row[1:] for row in rows}


def line_of(page: str, start: str) -> list[str]:
    (line,) = [line for line in text(page).splitlines() if line.startswith(f"| {start} |")]
    return cells(line)


def test_the_readme_has_the_figures_of_the_page():
    (paragraph,) = re.findall(
        r"^On one H200, bf16, forward and backward, at 8192.*?\n\[", text("README.md"), re.M | re.S
    )
    rows = measured(SHAPES[0])
    methods = ("autosp fast", "autosp lean", "F.linear + CE", "torch.compile", "Liger")
    expected = [(rows[name][0], rows[name][3]) for name in methods]
    assert re.findall(r"([\d.]+)\s+ms\s+and\s+([\d.]+)\s+GiB", paragraph) == expected


@pytest.mark.parametrize("place, shape", list(enumerate(SHAPES)))
def test_the_overview_has_the_figures_of_the_page(place: int, shape: str):
    names = {"torch.compile of it": "torch.compile", "Liger 0.8.5": "Liger", "DeepSpeed 0.19.8": "DeepSpeed"}
    names |= {"cut-cross-entropy 25.1.1": "cut-cross-entropy", "F.linear + CE": "F.linear + CE"}
    names |= {f"**autosp {way}**": f"autosp {way}" for way in ("fast", "main_grad", "lean")}
    rows = measured(shape)
    for shown, name in names.items():
        assert line_of("docs/benchmarks.md", shown)[place + 1] == f"{rows[name][1]} ({rows[name][3]})"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_summary_and_the_ratios_follow_from_the_figures(shape: str):
    rows = measured(shape)
    summary = line_of("docs/benchmarks_linear_loss.md", shape)
    gemms = float(summary[1].removesuffix(" ms"))
    for way, column in COLUMNS.items():
        assert summary[column] == f"{rows[f'autosp {way}'][0]} ms, {rows[f'autosp {way}'][1]}"
    for name, (ms, ratio, *_) in rows.items():
        if not name.endswith("KL"):
            assert float(ratio[:-1]) == pytest.approx(float(ms) / gemms, abs=0.006)


def test_the_bars_are_judged_by_the_figures():
    """Ratios to the GEMMs alone and to the burst floor of each bar, over the three shapes."""
    rows = [measured(shape) for shape in SHAPES]
    for bar, way in (("fast", "fast"), ("the same", "main_grad"), ("lean", "lean"), ("linear KL", "KL")):
        (line,) = [x for x in text("docs/benchmarks_linear_loss.md").splitlines() if x.startswith(f"| {bar} ")]
        for column in (1, 2):
            assert " / ".join(r[f"autosp {way}"][column] for r in rows) in cells(line)[column], (bar, column)
