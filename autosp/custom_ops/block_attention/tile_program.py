"""A program divided in two: what varies along queries or keys alone, and what is done to every score of a tile.

The first part is small: torch computes it once a call, as vectors of one element a query or a key. Only the second part
runs inside of a fused kernel, which loads the elements that its tile needs. Dtypes are torch's own: every step is run
on meta tensors once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .program import Block, parse, reference, run_step

# Sizes of batch, heads, queries and keys on meta tensors: all different, so that a result's shape says what it is.
_SIZES = (2, 3, 5, 7)
_KINDS = (torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16)


class Unsupported(Exception):
    """Why a program cannot run in a fused kernel."""


@dataclass(frozen=True)
class Input:
    """A tensor that tiles load: ``vector`` (one element a query, a key, or neither), ``dense`` (one a query and key,
    with a stride for each of its four dimensions) or ``table`` (read by index, with a size for each dimension).

    Args:
        source: what it is in the program, such as ``("step", 3)``.
        slot: place of its pointer among what a kernel is given; its strides or sizes are at ``slots``.
        batch, head, query, key: whether it varies along that dimension.
        rank: number of dimensions, since none at all gives way to others in type promotion.
    """

    source: tuple[str, int]
    kind: str
    dtype: torch.dtype
    slot: int
    slots: tuple[int, ...]
    batch: bool
    head: bool
    query: bool
    key: bool
    rank: int


@dataclass(frozen=True)
class Step:
    """One step of a tile: operands are references to steps, inputs and positions, or literals."""

    index: int
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype


@dataclass
class TileProgram:
    """What happens to a tile; ``score`` and ``mask`` are references, None where the program has none.

    References are those of ``program``, but ``{"input": i}`` stands for everything that is loaded.
    """

    steps: list[Step] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    metas: dict[int, Tensor] = field(default_factory=dict)
    score: Any = None
    mask: Any = None

    def dtype(self, ref: Any) -> torch.dtype | None:
        """The dtype of what a reference stands for; None for a literal."""
        kind, at = reference(ref)
        if kind == "step":
            return self.metas[at].dtype
        if kind == "input":
            return self.inputs[at].dtype
        if kind == "index":
            return torch.int64
        return torch.float32 if kind == "score" else None


def leaf_kinds(leaves: Sequence[Tensor]) -> tuple[Any, ...]:
    """What a tile program depends on in its leaves: their dtypes and which of their dimensions are broadcast."""
    return tuple((x.dtype, tuple(size == 1 for size in x.shape)) for x in leaves)


@functools.lru_cache(maxsize=256)
def tile_program(program: str, kinds: tuple[Any, ...]) -> TileProgram:
    """The part of a program that a fused kernel has to run.

    Args:
        program: see ``program``.
        kinds: ``leaf_kinds`` of its leaves.

    Raises:
        Unsupported: a step that torch cannot run on meta tensors, or a dtype that kernels do not hold.
    """
    return _Writer(parse(program), kinds).write()


class _Writer:
    def __init__(self, program: dict[str, Any], kinds: tuple[Any, ...]) -> None:
        self.program, self.kinds = program, kinds
        self.out = TileProgram()
        self.slots = 0
        self.known: dict[tuple[str, int], int] = {}
        positions = [torch.empty(size, dtype=torch.int64, device="meta") for size in _SIZES[2:]]
        self.block = Block((0, _SIZES[0]), (0, _SIZES[1]), *positions)
        self.leaves = [self._meta_leaf(*kind) for kind in kinds]
        self.metas: list[Any] = []

    def write(self) -> TileProgram:
        for name, args, kwargs in self.program["steps"]:
            self.metas.append(self._run(name, args, kwargs))
        ends = [self.program.get(name) for name in ("score", "mask")]
        needed = self._needed([end for end in ends if end is not None])
        if ends[0] is None and any("'score'" in str(self.program["steps"][at]) for at in needed):
            raise Unsupported("a mask that looks at scores")
        for index, (name, args, kwargs) in enumerate(self.program["steps"]):
            meta = self.metas[index]
            if index not in needed or not self._is_tile(meta):
                continue
            self._check_dtype(meta.dtype, name)
            new_args = tuple(self._operand(arg, name) for arg in args)
            new_kwargs = {key: self._operand(arg, name) for key, arg in kwargs.items()}
            self.out.steps.append(Step(index, name, new_args, new_kwargs, meta.dtype))
            self.out.metas[index] = meta
        self.out.score, self.out.mask = (None if end is None else self._operand(end, "the result") for end in ends)
        return self.out

    def _meta_leaf(self, dtype: torch.dtype, broadcast: tuple[bool, ...]) -> Tensor:
        if len(broadcast) > 4:
            raise Unsupported(f"a tensor of {len(broadcast)} dimensions")
        sizes = _SIZES[4 - len(broadcast) :]
        shape = [1 if single else size for single, size in zip(broadcast, sizes, strict=True)]
        return torch.empty(shape, dtype=dtype, device="meta")

    def _meta_table(self, at: int) -> Tensor:
        dtype, broadcast = self.kinds[at]
        return torch.empty([1 if single else 2 for single in broadcast], dtype=dtype, device="meta")

    def _run(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        scores = torch.empty(_SIZES, dtype=torch.float32, device="meta")

        def value(arg: Any) -> Any:
            if isinstance(arg, list):
                return [value(item) for item in arg]
            if not isinstance(arg, dict):
                return arg
            kind, at = reference(arg)
            if kind == "leaf":
                return self.leaves[at]
            if kind == "whole":
                return self._meta_table(at)
            if kind == "step":
                return self.metas[at]
            if kind == "number":
                return 1
            if kind == "index":
                return self.block.index(at)
            return getattr(torch, at) if kind == "dtype" else scores

        call = {key: value(arg) for key, arg in kwargs.items()}
        try:
            return run_step(name, [value(arg) for arg in args], call, torch.device("meta"))
        except (RuntimeError, NotImplementedError, IndexError, TypeError) as error:
            raise Unsupported(f"{name} does not run on meta tensors: {error}") from error

    def _needed(self, ends: list[Any]) -> set[int]:
        """Steps that the results are made of."""
        needed: set[int] = set()
        waiting = list(ends)
        while waiting:
            item = waiting.pop()
            if isinstance(item, list):
                waiting.extend(item)
            elif isinstance(item, dict):
                kind, at = reference(item)
                if kind == "step" and at not in needed:
                    needed.add(at)
                    _, args, kwargs = self.program["steps"][at]
                    waiting += [*args, *kwargs.values()]
        return needed

    @staticmethod
    def _is_tile(meta: Tensor) -> bool:
        return meta.dim() >= 2 and meta.shape[-1] != 1 and meta.shape[-2] != 1

    @staticmethod
    def _check_dtype(dtype: torch.dtype, what: str) -> None:
        if dtype not in _KINDS:
            raise Unsupported(f"{what} in {dtype}")

    def _operand(self, arg: Any, what: str) -> Any:
        if isinstance(arg, list):
            return tuple(self._operand(item, what) for item in arg)
        if not isinstance(arg, dict):
            return arg
        kind, at = reference(arg)
        if kind == "leaf":
            return self._input(kind, at, self.leaves[at])
        if kind == "whole":
            return self._table(at)
        if kind == "number":
            return self._input(kind, at, torch.empty((), dtype=torch.int64, device="meta"))
        if kind == "step" and not self._is_tile(self.metas[at]):
            if self._depends_on_scores(at):
                raise Unsupported(f"{what} of scores that were summed up")
            return self._input(kind, at, self.metas[at])
        return arg

    def _depends_on_scores(self, step: int) -> bool:
        behind = self._needed([{"step": step}])
        return any(self._is_tile(self.metas[at]) or "'score'" in str(self.program["steps"][at]) for at in behind)

    def _input(self, kind: str, at: int, meta: Tensor) -> dict[str, int]:
        self._check_dtype(meta.dtype, "a tensor")
        if (kind, at) not in self.known:
            shape = (1,) * (4 - meta.dim()) + tuple(meta.shape)
            batch, head, query, key = (size != 1 for size in shape)
            dense = query and key
            self._add((kind, at), "dense" if dense else "vector", meta, 4 if dense else 0, (batch, head, query, key))
        return {"input": self.known[kind, at]}

    def _table(self, at: int) -> dict[str, int]:
        dtype, broadcast = self.kinds[at]
        if not broadcast:
            return self._input("whole", at, torch.empty((), dtype=dtype, device="meta"))
        self._check_dtype(dtype, "a table")
        if ("whole", at) not in self.known:
            self._add(("whole", at), "table", self._meta_table(at), len(broadcast), (False,) * 4)
        return {"input": self.known["whole", at]}

    def _add(self, source: tuple[str, int], kind: str, meta: Tensor, extra: int, varies: tuple[bool, ...]) -> None:
        slots = tuple(range(self.slots + 1, self.slots + 1 + extra))
        self.known[source] = len(self.out.inputs)
        self.out.inputs.append(Input(source, kind, meta.dtype, self.slots, slots, *varies, meta.dim()))
        self.slots += 1 + extra


def compute_inputs(
    tiles: TileProgram, program: dict[str, Any], block: Block, leaves: Sequence[Tensor], numbers: Sequence[int]
) -> list[Tensor]:
    """The tensors of ``tiles.inputs``: a vector as ``[batch or 1, heads or 1, queries, keys or 1]``, contiguous, dense
    and tables as they are (dense ones cut to the batch rows and heads of the block).
    """
    results: dict[int, Any] = {}

    def value(arg: Any) -> Any:
        if isinstance(arg, list):
            return [value(item) for item in arg]
        if not isinstance(arg, dict):
            return arg
        kind, at = reference(arg)
        if kind == "leaf":
            return block.cut(leaves[at])
        if kind == "whole":
            return leaves[at]
        if kind == "step":
            if at not in results:
                name, args, kwargs = program["steps"][at]
                call = {key: value(item) for key, item in kwargs.items()}
                results[at] = run_step(name, [value(item) for item in args], call, block.queries.device)
            return results[at]
        if kind == "number":
            return numbers[at]
        return block.index(at) if kind == "index" else getattr(torch, at)

    device = block.queries.device
    found = []
    for item in tiles.inputs:
        kind, at = item.source
        if item.kind == "table":
            found.append(leaves[at].to(device).contiguous())
        elif item.kind == "dense":
            found.append(block.cut_rows(leaves[at]))
        else:
            made = value({kind: at})
            if not isinstance(made, Tensor):
                made = torch.full((), made, dtype=torch.int64, device=device)
            made = made.to(device)
            found.append(made.reshape((1,) * (4 - made.dim()) + tuple(made.shape)).contiguous())
    return found
