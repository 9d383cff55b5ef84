"""From the part of a program that runs on tiles to Triton functions, which the kernels call on every tile.

Three functions, each of the scores and of where the tile lies (``_PLACE``):

``change``  the new scores
``see``     what is visible
``pull``    the gradient of the scores from that of the new scores; gradients of vectors are added to their buffers

They only broadcast, so a kernel may hold queries along rows (``row [M, 1]``, ``key [1, N]``) or along columns. ``pull``
sums along axes and wants queries along rows where it has buffers to add to.
"""

from __future__ import annotations

import functools
import itertools
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..program import reference
from ..tile_program import Input, Step, TileProgram, Unsupported, tile_program
from .common import FIRST_BATCH, FIRST_HEAD, HEADS, KEYS, ROWS
from .operators import DERIVATIVES, HALF, WRITERS, Value, cast, fits, literal, range_of, selected

# Local rows of q and k, their positions, batch row and head here, the numbers of ``common``, and which rows exist.
_PLACE = "row, key, query_at, key_at, batch, head, place, row_ok, key_ok"
_POSITION = (0, 2**31 - 1)
_numbers = itertools.count()


@triton.jit
def _tanh(x):
    # By exp(-2|x|), which cannot overflow; by a series near 0, where that form cancels.
    a = tl.abs(x)
    e = tl.exp(a * -2.0)
    a2 = a * a
    t = tl.where(a < 0.1, a * (1.0 - a2 * (1.0 / 3.0) + a2 * a2 * (2.0 / 15.0)), (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, t * -1.0, t)


@triton.jit
def _floor_divide(a, b):
    whole = tl.abs(a) // tl.abs(b)
    rest = tl.abs(a) - whole * tl.abs(b)
    below = (a < 0) != (b < 0)
    return tl.where(below, 0 - whole - tl.where(rest != 0, 1, 0), whole)


# What the functions may name.
_GIVEN = {
    "_tanh": _tanh, "_floor_divide": _floor_divide, "FIRST_BATCH": FIRST_BATCH, "FIRST_HEAD": FIRST_HEAD,
    "HEADS": HEADS, "ROWS": ROWS, "KEYS": KEYS,
}  # fmt: skip


@triton.jit
def nothing(score):
    """Stands where a program has no such function; never called."""
    return score


@dataclass(frozen=True)
class TileFunctions:
    """Triton functions of one program; ``nothing`` where it has none. ``wanted``: inputs that get gradients."""

    change: Any
    see: Any
    pull: Any
    wanted: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def tile_functions(program: str, kinds: tuple[Any, ...], wanted: tuple[int, ...] = (), pull: bool = True) -> Any:
    """The functions of a program.

    Args:
        program, kinds: as ``tile_program.tile_program`` takes them.
        wanted: inputs whose gradients are needed.
        pull: whether the backward is wanted; False leaves it out.

    Raises:
        Unsupported: a step that is not written here, or has no derivative here.
    """
    tiles = tile_program(program, kinds)
    sources = []
    if tiles.score is not None:
        sources.append(_change(tiles))
    if tiles.mask is not None:
        sources.append(_see(tiles))
    if tiles.score is not None and pull:
        sources.append(_pull(tiles, wanted))
    made = _compiled("\n\n\n".join(sources))
    return TileFunctions(*(made.get(name, nothing) for name in ("change", "see", "pull")), wanted)


def _compiled(source: str) -> dict[str, Any]:
    """Functions of a source, which Triton reads again by its file name."""
    name = f"<autosp tile functions {next(_numbers)}>"
    text = f"import triton\nimport triton.language as tl\n\n\n{source}\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {**_GIVEN, "__name__": __name__}
    exec(compile(text, name, "exec"), space)
    return space


class _Body:
    """Lines of a function that computes steps of a program."""

    def __init__(self, tiles: TileProgram) -> None:
        self.tiles = tiles
        self.lines: list[str] = []
        self.known: dict[tuple[str, Any], Value] = {("score", 0): Value("score", torch.float32)}
        self.steps = {step.index: step for step in tiles.steps}

    def value(self, ref: Any) -> Any:
        """The value of a reference, its lines written before."""
        kind, at = reference(ref)
        if kind == "dtype" or at is None:
            return None
        if not kind:
            return literal(at)
        if (kind, at) not in self.known:
            if kind == "step":
                self.known[kind, at] = self._step(self.steps[at])
            elif kind == "input":
                self.known[kind, at] = self._input(at, self.tiles.inputs[at])
            else:
                self.known[kind, at] = _position(at)
        return self.known[kind, at]

    def _step(self, step: Step) -> Value:
        short = step.name.partition(".")[0].removeprefix("aten::")
        if short == "index":
            return self._read(step)
        writer = WRITERS.get(short)
        given = {key: arg for key, arg in step.kwargs.items() if key != "dtype"}
        if writer is None or given not in ({}, {"alpha": 1}):
            raise Unsupported(f"{step.name}{f' with {sorted(given)}' if given else ''}")
        args = [self.value(arg) for arg in step.args]
        if short in ("div", "floor_divide") and len(args) > 2:
            raise Unsupported(f"{step.name} with a rounding mode")
        span = range_of(short, args) if step.dtype == torch.int64 else None
        narrow = step.dtype == torch.int64 and fits(span) and all(x is None or fits(x.range) for x in args)
        text = writer(step.dtype, narrow, *args)
        if step.dtype in HALF:
            text = f"{text}.to({HALF[step.dtype]}).to(tl.float32)"
        name = f"v{step.index}"
        self.lines.append(f"{name} = {text}")
        return Value(name, step.dtype, span if narrow else None, narrow)

    def _input(self, at: int, item: Input) -> Value:
        if item.kind == "table":
            raise Unsupported("a table that is not read by index")
        name = f"x{at}"
        where, mask = _element(item) if item.kind == "vector" else _dense_element(item)
        load = f"tl.load(inputs[{item.slot}] + {where}" + (f", mask={mask}, other=0)" if mask else ")")
        self.lines.append(f"{name} = {_held(load, item.dtype)}")
        return Value(name, item.dtype, rank=min(item.rank, 1))

    def _read(self, step: Step) -> Value:
        """A table read by index; what lies outside, where torch raises, is NaN, or 0 of an integer table."""
        table = self.tiles.inputs[reference(step.args[0])[1]]
        name, indices = f"v{step.index}", [self.value(arg) for arg in step.args[1]]
        if any(x.dtype not in (torch.int32, torch.int64) for x in indices):
            raise Unsupported("an index that is no integer")
        inside, offset = [], ""
        for dim, index in enumerate(indices):
            size = f"inputs[{table.slots[dim]}]"
            part = f"{name}_{dim}"
            self.lines.append(f"{part} = {cast(index, torch.int64, index.narrow)}")
            self.lines.append(f"{part} = tl.where({part} < 0, {part} + {size}, {part})")
            inside.append(f"({part} >= 0) & ({part} < {size})")
            offset = f"({offset}) * {size} + {part}" if offset else part
        # As a comparison: the interpreter widens a conjunction of a tile and a scalar, and wants a boolean mask.
        self.lines.append(f"{name}_in = tl.where({' & '.join(inside)}, 1, 0) == 1")
        self.lines.append(f"{name}_at = {offset}")
        other = 'float("nan")' if table.dtype.is_floating_point else "0"
        load = f"tl.load(inputs[{table.slot}] + {name}_at, mask={name}_in, other={other})"
        self.lines.append(f"{name} = {_held(load, table.dtype)}")
        return Value(name, step.dtype)


def _position(name: str) -> Value:
    text = {
        "query": "query_at",
        "key": "key_at",
        "batch": "(place[FIRST_BATCH] + batch)",
        "head": "(place[FIRST_HEAD] + head)",
    }[name]
    return Value(text, torch.int64, _POSITION, narrow=True)


def _held(load: str, dtype: torch.dtype) -> str:
    """Booleans are loaded as bytes, halves are held in fp32."""
    if dtype == torch.bool:
        return f"({load} != 0)"
    return f"{load}.to(tl.float32)" if dtype in HALF else load


def _element(item: Input) -> tuple[str, str]:
    """Offset of a vector's element, and the mask of its load."""
    line = "(batch * place[HEADS] + head)" if item.batch and item.head else "batch" if item.batch else "head"
    line = line if item.batch or item.head else ""
    if not item.query and not item.key:
        return line or "0", ""
    place, count, mask = ("row", "place[ROWS]", "row_ok") if item.query else ("key", "place[KEYS]", "key_ok")
    return (f"({line}).to(tl.int64) * {count} + {place}" if line else place), mask


def _dense_element(item: Input) -> tuple[str, str]:
    names = ("batch", "head", "query_at", "key_at")
    used = (item.batch, item.head, item.query, item.key)
    parts = [f"{name}.to(tl.int64) * inputs[{slot}]" for name, slot, is_used in
             zip(names, item.slots, used, strict=True) if is_used]  # fmt: skip
    return " + ".join(parts), "row_ok & key_ok"


def _function(name: str, arguments: str, lines: Sequence[str]) -> str:
    return "@triton.jit\n" + "\n    ".join([f"def {name}({arguments}):", *lines])


def _change(tiles: TileProgram) -> str:
    body = _Body(tiles)
    result = cast(body.value(tiles.score), torch.float32)
    return _function("change", f"score, {_PLACE}, inputs", [*body.lines, f"return {result}"])


def _see(tiles: TileProgram) -> str:
    body = _Body(tiles)
    result = cast(body.value(tiles.mask), torch.bool)
    return _function("see", f"score, {_PLACE}, inputs", [*body.lines, f"return {result}"])


def _pull(tiles: TileProgram, wanted: tuple[int, ...]) -> str:
    body = _Body(tiles)
    body.value(tiles.score)
    reverse = _Reverse(body, wanted)
    lines = reverse.write(tiles.score)
    score = reverse.sums.get(("score", 0), [])
    result = " + ".join(score) if score else "tl.zeros_like(score)"
    return _function("pull", f"grad, score, {_PLACE}, inputs, gradients", [*body.lines, *lines, f"return {result}"])


class _Reverse:
    """Reverse-mode differentiation of the steps of a body; gradients are held in fp32."""

    def __init__(self, body: _Body, wanted: tuple[int, ...]) -> None:
        self.body, self.wanted = body, wanted
        self.lines: list[str] = []
        self.sums: dict[tuple[str, Any], list[str]] = {}

    def write(self, result: Any) -> list[str]:
        self._add(result, "grad")
        for step in reversed(self.body.tiles.steps):
            terms = self.sums.get(("step", step.index))
            if terms and step.dtype.is_floating_point:
                self.lines.append(f"g{step.index} = {' + '.join(terms)}")
                self._step(step, f"g{step.index}")
        for at in self.wanted:
            self._store(at)
        return self.lines

    def _flows(self, ref: Any) -> bool:
        """Whether something behind a reference has a gradient that is needed."""
        kind, at = reference(ref)
        if kind == "score":
            return True
        if kind == "input":
            return at in self.wanted
        if kind != "step" or not self.body.steps[at].dtype.is_floating_point:
            return False
        step = self.body.steps[at]
        flat = [item for arg in step.args for item in (arg if isinstance(arg, tuple) else (arg,))]
        return any(self._flows(arg) for arg in flat)

    def _add(self, ref: Any, text: str) -> None:
        if self._flows(ref):
            self.sums.setdefault(reference(ref), []).append(text)

    def _step(self, step: Step, upstream: str) -> None:
        short = step.name.partition(".")[0].removeprefix("aten::")
        if not any(self._flows(arg) for arg in step.args):
            return
        if short == "index":
            raise Unsupported("the gradient of a table")
        values = [self.body.value(arg) for arg in step.args]
        chosen = selected(short, values)
        if chosen is not None:
            for place, condition in chosen:
                self._add(step.args[place], f"tl.where({condition}, {upstream}, 0.0)")
            return
        if short not in DERIVATIVES:
            raise Unsupported(f"the derivative of {step.name}")
        texts = [x if x is None else cast(x, torch.float32) for x in values]
        factors = DERIVATIVES[short](f"v{step.index}", *texts)
        for arg, factor in zip(step.args, factors, strict=True):
            if factor is not None:
                self._add(arg, f"({upstream} {factor})")

    def _store(self, at: int) -> None:
        item = self.body.tiles.inputs[at]
        terms = self.sums.get(("input", at))
        if item.kind != "vector":
            raise Unsupported(f"the gradient of a {item.kind} tensor")
        if not terms:
            return
        self.lines.append(f"d{at} = {' + '.join(terms)}")
        slot = self.wanted.index(at)
        where, mask = _element(item)
        total = f"tl.sum(d{at}, {1 if item.query else 0}, keep_dims=True)"
        if not item.query and not item.key:
            total, mask = f"tl.sum(tl.sum(d{at}, 1), 0)", ""
        more = f", mask={mask}" if mask else ""
        self.lines.append(f"tl.atomic_add(gradients[{slot}] + {where}, {total}{more})")
