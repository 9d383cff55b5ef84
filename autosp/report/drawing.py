"""Where each operator stands in the picture of a report, and which edges carry communication."""

from __future__ import annotations

from typing import Any

from .records import GIVEN, GraphReport

_ROW, _COLUMN = 64, 190


def draw(report: GraphReport) -> dict[str, Any]:
    """Boxes and edges of the whole program, top to bottom: a value stands below everything that it is made from.

    Returns:
        ``{"boxes": [{name, x, y, kind, ...}], "edges": [{from, to, collectives: [names]}], "width", "height"}`` with
        positions in pixels.
    """
    depth = _depths(report)
    rows: dict[int, list[str]] = {}
    for node in report.nodes:
        if node.name in depth:
            rows.setdefault(depth[node.name], []).append(node.name)
    place = _columns(report, rows)
    boxes: list[dict[str, Any]] = [
        {"name": node.name, "x": place[node.name] * _COLUMN, "y": depth[node.name] * _ROW, "kind": node.kind}
        for node in report.nodes
        if node.name in depth
    ]
    marked: dict[tuple[str, str], list[str]] = {}
    for item in report.collectives:
        for source, target in item.edges:
            marked.setdefault((source, target), []).append(item.name)
    edges = [
        {"from": source, "to": node.name, "collectives": marked.get((source, node.name), [])}
        for node in report.nodes
        for source in node.inputs
        if source in depth
    ]
    xs = [box["x"] for box in boxes] or [0]
    return {
        "boxes": boxes,
        "edges": edges,
        "left": min(xs),
        "width": max(xs) - min(xs) + _COLUMN,
        "height": (max(depth.values(), default=0) + 1) * _ROW,
    }


def _depths(report: GraphReport) -> dict[str, int]:
    """The row of each value: one below its lowest input; what is given stands just above its first use."""
    given = {node.name for node in report.nodes if node.operator in GIVEN}
    depth: dict[str, int] = {}
    for node in report.nodes:
        if node.name not in given:
            depth[node.name] = 1 + max((depth.get(source, 0) for source in node.inputs), default=0)
    first: dict[str, int] = {}
    for node in report.nodes:
        for source in node.inputs:
            if source in given:
                first[source] = min(first.get(source, depth[node.name]), depth[node.name])
    depth.update({name: row - 1 for name, row in first.items()})
    return depth


def _columns(report: GraphReport, rows: dict[int, list[str]]) -> dict[str, float]:
    """The column of each value: near the middle of its neighbours above, no two in one place."""
    inputs = {node.name: node.inputs for node in report.nodes}
    users: dict[str, list[str]] = {}
    for node in report.nodes:
        for source in node.inputs:
            users.setdefault(source, []).append(node.name)
    place: dict[str, float] = {}
    for row in sorted(rows):
        wanted = {}
        for index, name in enumerate(rows[row]):
            above = [place[source] for source in inputs[name] if source in place]
            wanted[name] = sum(above) / len(above) if above else index + 1.0
        taken: set[int] = set()
        for name in sorted(rows[row], key=lambda one: wanted[one]):
            column = round(wanted[name])
            for offset in range(len(rows[row]) + 1):
                free = [c for c in (column + offset, column - offset) if c not in taken]
                if free:
                    column = free[0]
                    break
            taken.add(column)
            place[name] = float(column)
    return place
