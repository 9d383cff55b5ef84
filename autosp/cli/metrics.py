"""``metrics.jsonl``, one line a step, and the picture of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Metrics:
    """Appends one JSON object a step.

    Args:
        path: the file.
        step: the step that the run goes on from; lines of later steps, written after that checkpoint, go.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        kept = [row for row in read(path) if row["step"] <= step] if path.exists() and step else []
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        temporary.replace(path)
        self._file = path.open("a")

    def add(self, row: dict[str, Any]) -> None:
        """Write one step, at once, so that a crash loses none."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; a line that a crash cut off is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def draw(rows: list[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw loss against step into a PNG file, replaced as a whole."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    axes.plot(steps, losses, linewidth=1.2, marker="." if len(rows) < 40 else None)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
