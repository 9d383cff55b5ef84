"""Programs: what a model does to attention scores, as text that can be computed for any block of queries and keys.

A program is JSON, so that it is an argument of an operator like any other: it is printed with the graph, compared
between ranks and hashed by caches. It lists steps, each ``[operator, arguments, keyword arguments]``; an argument is a
literal or one of

===============  ==================================================================================
``{"leaf": i}``  tensor ``i``, broadcast against ``[batch, heads, queries, keys]``, cut to the block
``{"whole": i}`` tensor ``i`` as it is (a table that the program indexes)
``{"step": i}``  the result of step ``i``
``{"number": i}``  integer ``i`` of the numbers that are passed along
``{"index": x}`` positions along ``x``, one of "batch", "head", "query", "key", as int64 that broadcasts
``{"score": 0}`` the scores of the block, scaled
``{"dtype": x}`` a torch dtype
===============  ==================================================================================

``"score"`` names the result that replaces the scores, ``"mask"`` the boolean one that tells what is visible.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

UNBOUNDED = 2**40
OPEN_BOUNDS = (-UNBOUNDED, UNBOUNDED)
CAUSAL_BOUNDS = (0, UNBOUNDED)

# The first leaf is a boolean mask, or is added to the scores.
VISIBLE = json.dumps({"steps": [], "mask": {"leaf": 0}})
_FACTORIES = ("aten::full", "aten::scalar_tensor")
BIAS = json.dumps({"steps": [["aten::add.Tensor", [{"score": 0}, {"leaf": 0}], {}]], "score": {"step": 0}})


@functools.lru_cache(maxsize=256)
def parse(program: str) -> dict[str, Any]:
    """The program as a dictionary; ``""`` changes nothing."""
    return json.loads(program) if program else {"steps": []}


@functools.lru_cache(maxsize=512)
def operator(name: str) -> Any:
    """The torch operator of a step, from a name such as ``aten::add.Tensor``."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def run_step(name: str, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
    """One step on values; what it makes of numbers alone is made on ``device``."""
    if name in _FACTORIES:
        kwargs = {**kwargs, "device": device}
    return operator(name)(*args, **kwargs)


def reference(arg: Any) -> tuple[str, Any]:
    """``(kind, which)`` of a reference such as ``{"step": 3}``; ``("", arg)`` of a literal."""
    if not isinstance(arg, dict):
        return "", arg
    ((kind, at),) = arg.items()
    return kind, at


@dataclass
class Block:
    """A block of the scores: which batch rows, heads, queries and keys of the whole attention it holds.

    Args:
        batch: first batch row and how many there are.
        heads: first head and how many there are.
        queries: positions of the queries, int64.
        keys: positions of the keys, int64.
    """

    batch: tuple[int, int]
    heads: tuple[int, int]
    queries: Tensor
    keys: Tensor
    _cut: dict[int, Tensor] = field(default_factory=dict)

    def index(self, name: str) -> Tensor:
        """Positions along one dimension, shaped to broadcast against ``[batch, heads, queries, keys]``."""
        device = self.queries.device
        if name == "query":
            return self.queries.unsqueeze(-1)
        if name == "key":
            return self.keys
        first, count = self.batch if name == "batch" else self.heads
        span = torch.arange(first, first + count, device=device)
        return span.reshape(-1, 1, 1, 1) if name == "batch" else span.reshape(-1, 1, 1)

    def cut(self, leaf: Tensor) -> Tensor:
        """The part of a leaf that the block sees; dimensions of size 1 are broadcast and stay."""
        if leaf.dim() >= 1 and leaf.shape[-1] != 1:
            leaf = leaf.index_select(-1, self.keys)
        if leaf.dim() >= 2 and leaf.shape[-2] != 1:
            leaf = leaf.index_select(-2, self.queries)
        return self.cut_rows(leaf)

    def cut_rows(self, leaf: Tensor) -> Tensor:
        """The part of a leaf of the block's batch rows and heads, with all queries and keys."""
        if leaf.dim() >= 3 and leaf.shape[-3] != 1:
            leaf = leaf.narrow(-3, *self.heads)
        if leaf.dim() >= 4 and leaf.shape[-4] != 1:
            leaf = leaf.narrow(-4, *self.batch)
        return leaf


def evaluate(
    program: dict[str, Any], block: Block, leaves: Sequence[Tensor], numbers: Sequence[int], scores: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """``(scores, mask)`` of a block; None for what the program leaves alone.

    Args:
        program: as ``parse`` gives it.
        block: which part of the whole attention.
        leaves: tensors of the program, whole.
        numbers: integers of the program.
        scores: scaled scores of the block; None computes the mask alone, of a program that changes no scores.
    """
    results: list[Any] = []

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
            return results[at]
        if kind == "number":
            return numbers[at]
        if kind == "index":
            return block.index(at)
        if kind == "dtype":
            return getattr(torch, at)
        return scores

    for name, args, kwargs in program["steps"]:
        call = {key: value(arg) for key, arg in kwargs.items()}
        results.append(run_step(name, [value(arg) for arg in args], call, block.queries.device))
    new_scores = value(program["score"]) if program.get("score") is not None and scores is not None else None
    mask = value(program["mask"]) if program.get("mask") is not None else None
    return new_scores, mask
