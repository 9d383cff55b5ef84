"""The moments of most memory of a step, and its work, at one length.

A walk over the forward, then over the backward: a buffer lives from the work that makes it to the last that reads it;
what the backward reads lives from the forward until there, and gradients live until the end.
"""

from __future__ import annotations

from collections import defaultdict
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
    saved: dict[str, float] = defaultdict(float)
    for index, program in enumerate(trace.forward):
        sizes = _sizes(program, trace, length, known)
        kept = _kept(program)
        _walk(program, sizes, result, kept, dict(saved), ["forward"] * len(program.work), set())
        for number in kept:
            saved[program.buffers[number].part] += sizes[number]
        _add_work(program, trace, length, known, result)
        del index
    for program in trace.backward:
        sizes = _sizes(program, trace, length, known)
        _backward(program, trace, sizes, result, saved)
        _add_work(program, trace, length, known, result)
    return result


def _sizes(program: Program, trace: Trace, length: int, known: dict[object, float]) -> dict[int, float]:
    return {n: evaluate(b.size, trace.symbol, length, known) for n, b in program.buffers.items()}


def _kept(program: Program) -> set[int]:
    """Buffers that the forward returns or saves, but for those it was given."""
    given = set(program.given.values())
    return {number for number in program.returned if number is not None and number not in given}


def _walk(
    program: Program,
    sizes: dict[int, float],
    result: Profile,
    kept: set[int],
    live: dict[str, float],
    stretches: list[str],
    freed: set[int],
) -> None:
    """Make and free buffers in the order of the work; note the highest moment of each stretch.

    Args:
        kept: live until the end.
        live: bytes by part at the beginning; changed.
        freed: buffers given to the program that it may free after their last use.
    """
    last: dict[int, int] = {}
    for position, work in enumerate(program.work):
        for number in [*work.made, *work.read]:
            last[number] = position
    made: set[int] = set()
    for position, work in enumerate(program.work):
        for number in work.made:
            if number not in made and number not in program.given.values():
                live[program.buffers[number].part] = live.get(program.buffers[number].part, 0.0) + sizes[number]
                made.add(number)
        moment = result.moments.setdefault(stretches[position], Moment())
        if sum(live.values()) > moment.total:
            moment.parts = {**dict.fromkeys(PARTS, 0.0), **live}
        for number in {*work.made, *work.read}:
            if last[number] == position and number not in kept and (number in made or number in freed):
                live[program.buffers[number].part] -= sizes[number]


def _backward(
    program: Program, trace: Trace, sizes: dict[int, float], result: Profile, saved: dict[str, float]
) -> None:
    """The backward starts with what the forward saved; it frees that as it goes and keeps the gradients."""
    gradients = {number for number in program.returned if number is not None}
    for number in gradients - set(program.given.values()):
        program.buffers[number].part = "gradients"
    # parts of what comes in are those the forward gave them, in total; the backward's own view of it is one part
    given = _saved_inputs(program, trace)
    live = dict.fromkeys(PARTS, 0.0)
    total = sum(sizes[number] for number in given)
    known = sum(saved.values())
    for part, size in saved.items():
        live[part] += size
    live["activations"] += total - known
    _reassign(program, given, saved, sizes)
    _walk(program, sizes, result, gradients, live, _stretches(program.work), given)


def _reassign(program: Program, given: set[int], saved: dict[str, float], sizes: dict[int, float]) -> None:
    """Give the backward's inputs the parts that the forward made them in: by size, largest part last."""
    left = {part: size for part, size in saved.items() if part != "activations"}
    for number in sorted(given, key=lambda one: sizes[one]):
        fitting = [part for part, size in left.items() if size >= sizes[number] * 0.999]
        program.buffers[number].part = fitting[0] if fitting else "activations"
        if fitting:
            left[fitting[0]] -= sizes[number]


def _saved_inputs(program: Program, trace: Trace) -> set[int]:
    """Buffers given to the backward that are neither weights nor the model's inputs nor the loss's gradient."""
    return {number for name, number in program.given.items() if not name.startswith(("primals", "tangents"))}


def _stretches(work: list[Work]) -> list[str]:
    numbers = [item.layer for item in work if item.layer is not None]
    if not numbers:
        return ["head"] * len(work)
    newest, oldest = max(numbers), min(numbers)
    names = []
    seen = False
    for item in work:
        seen = seen or item.layer is not None
        if not seen:
            names.append("head")
        elif item.layer == newest:
            names.append("last")
        elif item.layer == oldest:
            names.append("first")
        else:
            names.append("middle")
    return names


def _add_work(program: Program, trace: Trace, length: int, known: dict[object, float], result: Profile) -> None:
    share = (trace.ranks - 1) / trace.ranks
    for work in program.work:
        flops, moved, sent = (evaluate(x, trace.symbol, length, known) for x in (work.flops, work.moved, work.sent))
        result.flops += flops
        result.moved += moved
        result.sent += sent * share
        result.kernels.append((flops, moved))
