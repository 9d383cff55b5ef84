"""What a rule sees of one operator call, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .axis import Axis
from .placement import REPLICATE, IntLike, Partial, Placement, Replicate, Shard


class Refusal(Exception):
    """A rule cannot keep these layouts exactly.

    Args:
        reason: what was found and why it cannot be kept.
        remedy: what a user can do.
        always: gathering the operands would not make it right either.
    """

    def __init__(self, reason: str, remedy: str = "", *, always: bool = False) -> None:
        self.reason = reason
        self.remedy = remedy
        self.always = always
        super().__init__(reason)


@dataclass(frozen=True)
class Value:
    """A tensor argument: its whole (global) fake tensor and its layout.

    Args:
        node: the node that makes it.
        val: fake tensor of the whole value.
        placement: its layout on the axis.
        home: the cut over tokens that the value would have, or None: where a value that is replicated, or cut over
            another dimension (heads), goes when it meets a token-wise operator.
    """

    node: fx.Node
    val: torch.Tensor
    placement: Placement
    home: Shard | None = None

    @property
    def shape(self) -> torch.Size:
        return self.val.shape

    @property
    def ndim(self) -> int:
        return self.val.dim()

    @property
    def dtype(self) -> torch.dtype:
        return self.val.dtype

    @property
    def shard(self) -> Shard | None:
        """The cut, or None when the value is replicated or partial."""
        return self.placement if isinstance(self.placement, Shard) else None

    @property
    def is_replicated(self) -> bool:
        return isinstance(self.placement, Replicate)

    @property
    def is_partial(self) -> bool:
        return isinstance(self.placement, Partial)

    def dim(self, dim: int) -> int:
        """``dim`` counted from the front."""
        return dim % self.ndim if self.ndim else 0


LocalFunction = Callable[["OpCall", dict[str, Any]], Any]


@dataclass(frozen=True)
class Strategy:
    """How one operator runs on one rank.

    Args:
        inputs: needed layout by argument name (a sequence for a list of tensors); what is not named is needed
            replicated.
        output: layout of the result, a sequence for several results.
        local: computes the local result from the local arguments by name; None runs the operator itself.
        fills: by argument name, the number that padding rows get when a replicated argument is cut (default: copies of
            the nearest row).
        note: one line for the compile report.
        sharded: whether each rank computes a part, so that whole operands get only a part of their gradient on each
            rank; None tells it by the output (whole: no).
        tileable: whether ``local`` treats each position of the grid alone and asks nothing but sizes of ``call.axis``,
            so that it runs on some of a rank's positions as it does on all of them.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)
    output: Any = REPLICATE
    local: LocalFunction | None = None
    fills: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    sharded: bool | None = None
    tileable: bool = False


@dataclass
class OpCall:
    """One call of an ATen operator, its arguments bound to the names of its schema.

    ``homing`` is True while the cut over tokens is asked for that the result would have, whatever its real layout.
    """

    node: fx.Node
    target: Any
    args: dict[str, Any]
    out: Any
    axis: Axis
    homing: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.args.get(name, default)

    @property
    def name(self) -> str:
        return str(self.target)

    @property
    def out_shape(self) -> Sequence[IntLike]:
        return self.out.shape

    def values(self) -> list[tuple[str, Value]]:
        """Every tensor argument with its name, lists flattened, in the order of the schema."""
        found: list[tuple[str, Value]] = []
        for name, arg in self.args.items():
            if isinstance(arg, Value):
                found.append((name, arg))
            elif isinstance(arg, (list, tuple)):
                found.extend((name, item) for item in arg if isinstance(item, Value))
        return found

    def run(self, local: Mapping[str, Any], /, **changed: Any) -> Any:
        """Run the operator itself on local arguments, some of them changed; ``self`` may be among them."""
        return call_by_name(self.target, {**local, **changed})


def call_by_name(target: Any, bound: Mapping[str, Any]) -> Any:
    """Call an operator overload with arguments by schema name."""
    args, kwargs = [], {}
    for argument in target._schema.arguments:
        if argument.name not in bound:
            continue
        if argument.kwarg_only:
            kwargs[argument.name] = bound[argument.name]
        else:
            args.append(bound[argument.name])
    return target(*args, **kwargs)


def bind_arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of a node by schema name, defaults filled in; nodes stay nodes."""
    bound: dict[str, Any] = {}
    positional = [a for a in node.target._schema.arguments if not a.kwarg_only]
    for argument, value in zip(positional, node.args, strict=False):
        bound[argument.name] = value
    for argument in node.target._schema.arguments:
        if argument.name in bound:
            continue
        if argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound
