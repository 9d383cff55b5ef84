"""Pictures of a measurement: panels of dots, one dot a method, how many times its floor it takes going up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OURS = "autosp"
_OURS_COLOUR, _OTHER_COLOURS = "tab:red", ("tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:cyan")


@dataclass(frozen=True)
class Dot:
    """One measurement: on which panel, of which method, where along the panel, and its time over its floor."""

    panel: str
    method: str
    x: float | str
    """A number, or the name of a column; the dots of a picture have one kind."""
    ratio: float

    @property
    def ours(self) -> bool:
        return self.method.startswith(_OURS)


def draw_dots(dots: Sequence[Dot], path: Path, *, xlabel: str, ylabel: str, panel_size: tuple[float, float]) -> None:
    """Draw the dots, one panel beside the other, autosp's in red.

    Args:
        dots: at least one. Where x is a number its axis is logarithmic and each dot bears its method's name; where it
            is a name it is a column, and a legend tells the methods.
        path: the picture; its ending says of which kind (.png, .svg, .pdf).
        panel_size: width and height of one panel in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(dot.panel for dot in dots))
    figure = Figure(figsize=(panel_size[0] * len(names), panel_size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    columns = isinstance(dots[0].x, str)
    colours = _colours(dots)
    for axis, name in zip(axes, names, strict=True):
        shown = [dot for dot in dots if dot.panel == name]
        (_draw_columns if columns else _draw_named)(axis, shown, colours)
        axis.set(yscale="log", title=name, xlabel=xlabel, ylabel=ylabel)
        _label_ratios(axis)
        axis.grid(alpha=0.3)
    if columns:
        legend = {label: mark for axis in axes for mark, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(list(legend.values()), list(legend), loc="outside upper center", ncols=len(legend), fontsize=8)
    figure.savefig(path, dpi=130)


def _colours(dots: Sequence[Dot]) -> dict[str, str]:
    others = dict.fromkeys(dot.method for dot in dots if not dot.ours)
    found = {method: _OTHER_COLOURS[n % len(_OTHER_COLOURS)] for n, method in enumerate(others)}
    return found | {dot.method: _OURS_COLOUR for dot in dots if dot.ours}


def _draw_named(axis: Any, dots: Sequence[Dot], colours: dict[str, str]) -> None:
    for dot in dots:
        colour = colours[dot.method] if dot.ours else _OTHER_COLOURS[0]
        axis.scatter(dot.x, dot.ratio, color=colour, marker="o" if dot.ours else "s")
        offset = (5, 5 if dot.ours else -10)
        axis.annotate(dot.method, (dot.x, dot.ratio), textcoords="offset points", xytext=offset, fontsize=8)
    axis.set_xscale("log")
    axis.margins(x=0.2)  # the names stand to the right of their dots


def _draw_columns(axis: Any, dots: Sequence[Dot], colours: dict[str, str]) -> None:
    columns = list(dict.fromkeys(dot.x for dot in dots))
    for method in dict.fromkeys(dot.method for dot in dots):
        own = [dot for dot in dots if dot.method == method]
        places = [columns.index(dot.x) for dot in own]
        marker = "o" if own[0].ours else "s"
        axis.scatter(places, [dot.ratio for dot in own], color=colours[method], marker=marker, label=method)
    axis.set_xticks(range(len(columns)), columns, rotation=30, ha="right", fontsize=8)


def _label_ratios(axis: Any) -> None:
    """Ratios as "1.2x" along the vertical axis, more of them where they are close together."""
    from matplotlib import ticker

    low, high = axis.get_ylim()
    subs = (1, 1.2, 1.5, 2, 3, 5) if high < 20 * low else (1, 2, 5)
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=subs))
    axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%.1fx"))
    axis.yaxis.set_minor_locator(ticker.NullLocator())
