"""The moments of most memory of a step, and its work, at one length.

A walk over the forward, then over the backward: a buffer lives from the work that makes it to the last that reads it;
what the backward reads lives from the forward until there, and gradients live until the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .program import PARTS, Program, Work
from .trace import Trace, evaluate


@dataclass
class Moment:
    """Bytes by part at one moment; weights and optimizer are not in it."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass
class Profile:
    """A step at one length: the highest moment of each stretch of it, and its work.

    Stretches are "forward", "head" (the backward before the numbered layers), "last" and "first" (layers, in the
    backward). Each grows evenly with the number of layers, which is what makes few layers tell about many.
    """

    moments: dict[str, Moment] = field(default_factory=dict)
    flops: float = 0.0
    moved: float = 0.0
    sent: float = 0.0
    kernels: list[tuple[float, float]] = field(default_factory=list)
    """Flops and bytes of each kernel."""
    repeat: tuple[list[tuple[float, float]], int, int] | None = None
    """The kernels of a step with fewer layers, how many layers are missing here, and by how many the two differ."""


def profile(trace: Trace, length: int) -> Profile:
    """Walk through the step at ``length`` tokens."""
    result = Profile()
    known: dict[object, float] = {}
    live = dict.fromkeys(PARTS, 0.0)
    parts: dict[str, str] = {}
    for program in trace.forward:
        sizes = _sizes(program, trace, length, known)
        _walk(program, sizes, result, live, _kept(program), set(), ["forward"] * len(program.work))
        # What a program is given and hands on (a weight) was counted by whoever gave it.
        given = set(program.given.values())
        made = {name: number for name, number in program.returned.items() if number not in given}
        parts.update({name: program.buffers[number].part for name, number in made.items()})
        _add_work(program, trace, length, known, result)
    # of several graphs the last one's backward runs first, and what the earlier ones saved is live meanwhile
    for program in trace.backward:
        sizes = _sizes(program, trace, length, known)
        _walk_backward(program, sizes, result, live, parts)
        _add_work(program, trace, length, known, result)
    return result


def _sizes(program: Program, trace: Trace, length: int, known: dict[object, float]) -> dict[int, float]:
    return {n: evaluate(b.size, trace.symbol, length, known) for n, b in program.buffers.items()}


def _kept(program: Program) -> set[int]:
    """Buffers that a program returns, but for those it was given."""
    return set(program.returned.values()) - set(program.given.values())


def _walk(
    program: Program,
    sizes: dict[int, float],
    result: Profile,
    live: dict[str, float],
    kept: set[int],
    freed: set[int],
    stretches: list[str],
) -> None:
    """Make and free buffers in the order of the work; note the highest moment of each stretch.

    Args:
        live: bytes by part at the beginning; those at the end afterwards.
        kept: buffers that are live at the end.
        freed: buffers given to the program that it frees after their last use.
        stretches: the stretch of each work.
    """
    last = {number: position for position, work in enumerate(program.work) for number in [*work.made, *work.read]}
    made: set[int] = set()
    for position, work in enumerate(program.work):
        for number in work.made:
            if number not in made and number not in program.given.values():
                live[program.buffers[number].part] += sizes[number]
                made.add(number)
        moment = result.moments.setdefault(stretches[position], Moment())
        if sum(live.values()) > moment.total:
            moment.parts = dict(live)
        for number in {*work.made, *work.read}:
            if last[number] == position and number not in kept and (number in made or number in freed):
                live[program.buffers[number].part] -= sizes[number]


def _walk_backward(
    program: Program, sizes: dict[int, float], result: Profile, live: dict[str, float], parts: dict[str, str]
) -> None:
    """The backward frees what the forward saved as it goes, and keeps the gradients that it returns."""
    gradients = _kept(program)
    for number in gradients:
        program.buffers[number].part = "gradients"
    # a saved value has one name in both graphs
    saved = {number for name, number in program.given.items() if name in parts}
    for name, number in program.given.items():
        if name in parts:
            program.buffers[number].part = parts[name]
    # An output that the loss does not use (the logits) gets a gradient of zeros, as large as itself.
    tangents = {number for name, number in program.given.items() if name.startswith("tangents")}
    for number in tangents:
        program.buffers[number].part = "loss"
        live["loss"] += sizes[number]
    _walk(program, sizes, result, live, gradients, saved | tangents, _stretches(program.work))


def _stretches(work: list[Work]) -> list[str]:
    numbers = [item.layer for item in work if item.layer is not None]
    if not numbers:
        return ["head"] * len(work)
    newest, oldest = max(numbers), min(numbers)
    names = []
    current: int | None = None
    for item in work:
        # Work of the head may be put off until the newest layer runs: it is at that layer's moment, not at one between.
        current = current if item.layer is None else item.layer
        if current is None:
            names.append("head")
        elif current == newest:
            names.append("last")
        elif current == oldest:
            names.append("first")
        else:
            names.append("middle")
    return names


def _add_work(program: Program, trace: Trace, length: int, known: dict[object, float], result: Profile) -> None:
    for work in program.work:
        flops, moved, sent = (evaluate(x, trace.symbol, length, known) for x in (work.flops, work.moved, work.sent))
        result.flops += flops
        result.moved += moved
        result.sent += sent
        result.kernels.append((flops, moved))
