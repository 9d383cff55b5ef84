"""A compile report for a terminal: layers that are alike are shown once."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .records import GIVEN, CollectiveRecord, GraphReport, NodeRecord

_BLOCK = re.compile(r"^(.*?\.)?(layers?|h|blocks?|layer)\.(\d+)(?=\.|$)")
COLOURS = {"sharded": "green", "replicated": "blue", "partial": "magenta", "number": "dim"}


def bytes_text(count: float) -> str:
    """ "1.5 GiB", "12 MiB", "0"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B" if count else "0"


@dataclass
class Block:
    """A stretch of operators of one layer, and the numbers of the layers that are like it."""

    title: str
    nodes: list[NodeRecord]
    signature: tuple[object, ...]
    like: list[str] = field(default_factory=list)


def print_report(report: GraphReport, *, title: str, passes: bool = False, console: Console | None = None) -> None:
    """Print a report: what it is about, each operator with its layout and its communication, masks, refusals."""
    console = console or Console(width=None if sys.stdout.isatty() else 180)
    sizes = ", ".join(f"{name} = {size}" for name, size in report.sizes.items())
    heading = f"{title}: rank {report.rank} of {report.ranks}" + (f", {sizes}" if sizes else "")
    console.print(Text(heading, style="bold"), soft_wrap=True)
    if report.refused:
        _print_refusal(console, report)
    else:
        _print_operators(console, report)
        _print_traffic(console, report)
        _print_lists(console, report)
    if passes:
        for entry in report.passes:
            console.print(Text(f"\nafter {entry.name} ({entry.seconds * 1000:.0f} ms)", style="bold"))
            console.print(Text(entry.text), soft_wrap=True)


def _print_refusal(console: Console, report: GraphReport) -> None:
    refused = report.refused
    console.print(Text(f"refused: {refused['operator']}: {refused['reason']}", style="yellow"), soft_wrap=True)
    for name in ("location", "remedy"):
        if refused[name]:
            console.print(Text(f"  {refused[name]}"), soft_wrap=True)


def _print_operators(console: Console, report: GraphReport) -> None:
    by_origin: dict[str, list[CollectiveRecord]] = {}
    for item in report.collectives:
        by_origin.setdefault(item.origin, []).append(item)
    for block in group_blocks(report.nodes):
        title = block.title + (f", and alike: {', '.join(block.like)}" if block.like else "")
        console.print(Text(f"\n{title}", style="bold"), soft_wrap=True)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in ("value", "operator", "sizes", "layout", "communication, bytes a step of one rank"):
            table.add_column(name, overflow="fold")
        for node in block.nodes:
            layout = Text(node.layout, style=COLOURS[node.kind])
            if node.note:
                layout.append(f"  ({node.note})", style="dim")
            moves = "\n".join(_move_text(item) for item in by_origin.get(node.name, ()))
            table.add_row(node.name, node.operator, f"[{', '.join(node.shape)}]".replace("[", "\\["), layout, moves)
        console.print(table)


def _move_text(item: CollectiveRecord) -> str:
    name = item.operator.removeprefix("autosp.").removesuffix(".default")
    directions = [(item.forward_bytes, "forward"), (item.backward_bytes, "backward")]
    sent = ", ".join(f"{bytes_text(count)} {where}" for count, where in directions if count) or "nothing sent"
    return f"{name} ({sent}): {item.reason}"


def _print_traffic(console: Console, report: GraphReport) -> None:
    console.print(
        Text(
            f"\n{len(report.collectives)} points of communication; one rank sends {bytes_text(report.forward_bytes)} "
            f"in the forward and {bytes_text(report.backward_bytes)} in the backward of a step",
            style="bold",
        ),
        soft_wrap=True,
    )
    totals: dict[str, list[int]] = {}
    for item in report.collectives:
        row = totals.setdefault(item.operator.removeprefix("autosp.").removesuffix(".default"), [0, 0, 0])
        row[0] += 1
        row[1] += item.forward_bytes
        row[2] += item.backward_bytes
    for name, (count, forward, backward) in totals.items():
        console.print(
            f"  {count} x {name}: {bytes_text(forward)} forward, {bytes_text(backward)} backward", highlight=False
        )


def _print_lists(console: Console, report: GraphReport) -> None:
    if report.masks:
        console.print(Text("\nmasks", style="bold"))
        kinds: dict[str, list[str]] = {}
        for mask in report.masks:
            size = f" ({bytes_text(mask.bytes)})" if mask.bytes else ""
            kinds.setdefault(mask.became + size, []).append(mask.layer or mask.attention)
        for became, where in kinds.items():
            more = f" and {len(where) - 1} more" if len(where) > 1 else ""
            console.print(Text(f"  {where[0]}{more}: {became}"), soft_wrap=True)
    if report.fused:
        console.print(Text("\nrewritten by passes", style="bold"))
        for sentence in report.fused:
            console.print(Text(f"  {sentence}"), soft_wrap=True)
    if report.gathered:
        console.print(Text('\ngathered (unsupported: "gather")', style="bold yellow"))
        for item in report.gathered:
            console.print(Text(f"  {item.operator}, {bytes_text(item.bytes)}: {item.reason}"), soft_wrap=True)
            console.print(Text(f"    at {item.location}"), soft_wrap=True)


def group_blocks(nodes: Sequence[NodeRecord]) -> list[Block]:
    """Calls of the graph in their order, cut where the layer changes; a numbered layer that is like an earlier one is
    only named by it.
    """
    blocks: list[Block] = []
    known: dict[tuple[object, ...], Block] = {}
    for title, members in _runs([node for node in nodes if node.operator not in GIVEN]):
        signature = tuple((n.operator, tuple(n.shape), n.layout, n.note) for n in members)
        numbered = _BLOCK.match(title)
        if numbered and signature in known:
            known[signature].like.append(title)
            continue
        block = Block(title or "(outside any module)", members, signature)
        if numbered:
            known[signature] = block
        blocks.append(block)
    return blocks


def _runs(nodes: Sequence[NodeRecord]) -> Iterator[tuple[str, list[NodeRecord]]]:
    current: str | None = None
    members: list[NodeRecord] = []
    for node in nodes:
        match = _BLOCK.match(node.layer)
        title = match.group(0) if match else node.layer
        if title != current and members:
            yield current or "", members
            members = []
        current = title
        members.append(node)
    if members:
        yield current or "", members
