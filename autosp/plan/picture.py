"""The longest sequence against the number of GPUs, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(lines: Mapping[str, Sequence[tuple[int, int]]], path: Path, *, title: str) -> None:
    """Draw one line for each name, (GPUs, tokens) each, into a PNG file that is replaced as a whole."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        for x, y in points:
            axes.annotate(tokens_text(y), (x, y), textcoords="offset points", xytext=(0, 6), fontsize=8, ha="center")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([], [])
    axes.set_yticks([], [], minor=True)
    axes.set(xlabel="GPUs that share one sequence", ylabel="longest sequence (tokens)", title=title)
    axes.margins(y=0.2)
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)


def tokens_text(count: int) -> str:
    """ "64k", "1.25M", "512"."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
