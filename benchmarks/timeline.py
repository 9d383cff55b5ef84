"""What a GPU ran when, of one layer forward and one backward, from a trace of ``autosp bench step --trace FOLDER``.

    python benchmarks/timeline.py trace/autosp-16384.json.gz timeline.png

One row for what computes and one for what communicates, in milliseconds since the step began. A layer is found by its
exchanges: two forward and two backward, for all layers but the embedding and the head.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

KINDS = {
    "attention": ("tab:orange", ("fmha", "flash", "sdpa")),
    "matrix products": ("tab:blue", ("nvjet", "gemm", "cublas", "cutlass")),
    "exchange of attention": ("tab:red", ("sendrecv",)),
    "sums of gradients": ("tab:green", ("allreduce", "reducescatter", "allgather")),
}
OTHER = ("elementwise and other", "lightgray")


def kernels(trace: Path) -> list[dict[str, Any]]:
    """Kernels of the GPU in their order: name, start and duration in milliseconds."""
    content = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    events = [e for e in json.loads(content)["traceEvents"] if e.get("cat") == "kernel"]
    begin = min(event["ts"] for event in events)
    found = [{"name": e["name"].lower(), "start": (e["ts"] - begin) / 1e3, "ms": e["dur"] / 1e3} for e in events]
    return sorted(found, key=lambda kernel: kernel["start"])


def kind(name: str) -> tuple[str, str]:
    """What a kernel is for, and its colour."""
    for label, (colour, words) in KINDS.items():
        if any(word in name for word in words):
            return label, colour
    return OTHER


def windows(found: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """From the first exchange of a middle layer to that of the one after, forward and backward."""
    exchanges = [kernel["start"] for kernel in found if kind(kernel["name"])[0] == "exchange of attention"]
    half = len(exchanges) // 2
    if half < 6:
        raise SystemExit(f"{len(exchanges)} exchanges of attention in the trace; 12 or more are needed (three layers)")
    at = half // 4 * 2
    return {
        "forward of one layer": (exchanges[at] - 1, exchanges[at + 2]),
        "backward of one layer": (exchanges[half + at] - 1, exchanges[half + at + 2]),
    }


def draw(trace: Path, picture: Path) -> None:
    """Draw both windows, one above the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = kernels(trace)
    panels = windows(found)
    figure = Figure(figsize=(11, 2.2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, (start, end)) in zip(figure.subplots(len(panels), 1), panels.items(), strict=True):
        for kernel in found:
            if start <= kernel["start"] <= end:
                label, colour = kind(kernel["name"])
                row = 0 if label in ("exchange of attention", "sums of gradients") else 1
                axes.broken_barh([(kernel["start"], kernel["ms"])], (row + 0.1, 0.8), color=colour, label=label)
        axes.set(title=title, xlim=(start, end), ylim=(0, 2), xlabel="ms", yticks=(0.5, 1.5))
        axes.set_yticklabels(("communication", "computation"))
    legend = {n: h for a in figure.axes for h, n in zip(*a.get_legend_handles_labels(), strict=True)}
    figure.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=len(legend), fontsize=8)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    draw(given.trace, given.picture)
