"""A compile report as one HTML page that needs nothing but itself: style, script and data are inside."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ..errors import InputError
from .drawing import draw
from .records import GraphReport


def page(graphs: Sequence[GraphReport], *, title: str) -> str:
    """The page of one or several graphs.

    Raises:
        InputError: there is no graph to show.
    """
    if not graphs:
        raise InputError("there is no graph to show: nothing was compiled while the report was collected")
    static = files("autosp.report").joinpath("static")
    data = {"graphs": [{**graph.as_dict(), "drawing": draw(graph)} for graph in graphs]}
    # "</" would end the script element inside a string of the data
    text = json.dumps(data).replace("</", "<\\/")
    parts = {
        "__STYLE__": static.joinpath("page.css").read_text(encoding="utf-8"),
        "__SCRIPT__": static.joinpath("page.js").read_text(encoding="utf-8"),
        "__TITLE__": html.escape(title),
        "__DATA__": text,
    }
    whole = static.joinpath("page.html").read_text(encoding="utf-8")
    for name, value in parts.items():
        whole = whole.replace(name, value)
    return whole


def write_page(path: Path, graphs: Sequence[GraphReport], *, title: str) -> None:
    """Write `page` to a file."""
    path.write_text(page(graphs, title=title), encoding="utf-8")
