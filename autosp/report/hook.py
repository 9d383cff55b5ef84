"""Where a compilation tells what it does: to a report that somebody collects, and to torch's structured trace.

Both are off by default, and cost nothing then: ``trace_structured`` asks for its payload only when a trace is written
(``TORCH_TRACE=folder``, read by tlparse), and no report is built unless `collect` is entered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch._logging import trace_structured

if TYPE_CHECKING:
    from .records import GraphReport, PassRecord


class Collector:
    """The reports of the graphs that were compiled while it listened, in order."""

    def __init__(self) -> None:
        self.graphs: list[GraphReport] = []
        self.passes: list[PassRecord] = []
        self.masks: dict[str, str] = {}


_collector: ContextVar[Collector | None] = ContextVar("autosp_report", default=None)


@contextmanager
def collect() -> Iterator[list[GraphReport]]:
    """Collect the report of every graph that is compiled inside; the list grows as they are."""
    collector = Collector()
    token = _collector.set(collector)
    try:
        yield collector.graphs
    finally:
        _collector.reset(token)


def observe_pass(name: str, work: Any) -> None:
    """A pass is done ("captured": none yet); ``work`` is the pipeline's."""
    collector = _collector.get()
    if collector is not None:
        from .build import masks_of, pass_record

        if name == "captured":
            collector.passes, collector.masks = [], masks_of(work.graph)
        collector.passes.append(pass_record(name, work))
    number = 0 if name == "captured" else len(work.seconds)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"autosp_{number:02d}_{name}", "encoding": "string"},
        payload_fn=lambda: _text(work),
    )


def observe_program(work: Any) -> None:
    """The program of one rank is complete."""
    collector = _collector.get()
    if collector is not None:
        from .build import build_report

        collector.graphs.append(build_report(work, collector.passes, collector.masks))
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "autosp_report", "encoding": "json"},
        payload_fn=lambda: _json(work),
    )


def observe_refusal(error: Any, work: Any) -> None:
    """A pass refused the graph."""
    collector = _collector.get()
    if collector is not None:
        from .build import build_refused

        collector.graphs.append(build_refused(error, work, collector.passes))
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "autosp_refused", "encoding": "string"},
        payload_fn=lambda: str(error),
    )


def _text(work: Any) -> str:
    from .graph_text import graph_text

    return graph_text(work.graph)


def _json(work: Any) -> str:
    from .build import build_report

    return json.dumps(build_report(work, [], {}).as_dict())
