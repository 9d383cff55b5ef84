"""Keys of traced calls: equal only where the calls record equal graphs, see `autosp.repeats`."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.sym_node import SymNode

_EXACT = (
    bool,
    int,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_BUILT_IN = (
    torch._ops.OpOverload, torch._ops.OpOverloadPacket, types.BuiltinFunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.MethodWrapperType, types.ModuleType, type,
)  # fmt: skip
# Functions of these are known to give the same for the same; what a user's function looks at is not known.
_OWN = ("autosp", "torch", "operator", "_operator", "math", "builtins")


class Unkeyed(Exception):
    """A value that two calls cannot be compared by."""


class Repeated:
    """A result of copied nodes. It is a tensor only once a call that runs asks for it, see `Repeats.tensors`.

    Args:
        node: the node that makes it.
        requires_grad: whether its tensor would.
        key: what `Keys.of_tensor` would give for it.
    """

    __slots__ = ("key", "node", "requires_grad", "tensor")

    def __init__(self, node: fx.Node, requires_grad: bool, key: Any) -> None:
        self.node = node
        self.requires_grad = requires_grad
        self.key = key
        self.tensor: torch.Tensor | None = None


class Keys:
    """Hashable keys of values, of tensors by their metadata and of calls.

    Keys of immutable values are remembered; a size whose expression is simplified in between then has another key,
    which only costs a call that runs.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def of_call(self, what: Any, args: Any, kwargs: Any, operands: list[Any]) -> Any:
        """Key of a call; its tensors are appended to ``operands``, each once, and stand in the key by their place.

        Raises:
            Unkeyed: the call must run.
        """
        key = _state(), self.of(what), self._operand_key(args, operands), self._operand_key(kwargs, operands)
        return (*key, tuple(self.of_tensor(x) for x in operands))

    def _operand_key(self, value: Any, operands: list[Any]) -> Any:
        if isinstance(value, (FakeTensor, Repeated)):
            index = next((i for i, x in enumerate(operands) if x is value), len(operands))
            if index == len(operands):
                operands.append(value)
            return "operand", index
        if isinstance(value, (list, tuple)):
            return type(value), tuple(self._operand_key(item, operands) for item in value)
        if isinstance(value, dict):
            return dict, tuple((name, self._operand_key(item, operands)) for name, item in value.items())
        return self.of(value)

    def of_tensor(self, value: Any) -> Any:
        """Metadata of a tensor of the trace, or of the tensor that a result of copied nodes stands for."""
        if not isinstance(value, torch.Tensor):
            if value.tensor is None:
                return value.key
            value = value.tensor
        return (*self._metadata(value), value.requires_grad)

    def _metadata(self, value: torch.Tensor) -> Any:
        if type(value) is not FakeTensor or value.layout is not torch.strided:
            raise Unkeyed
        if value.constant is not None and value.constant.numel():
            raise Unkeyed  # its numbers may be read
        sizes = tuple(map(_number, (*value.shape, *value.stride(), value.storage_offset())))
        return value.dim(), sizes, value.dtype, value.device, value.is_conj(), value.is_neg()

    def of(self, value: Any) -> Any:
        """Key of a value that is no operand: its type and whatever it consists of."""
        kind = type(value)
        if kind in _EXACT:
            return kind, value
        if kind is torch.SymInt:
            return _number(value)
        if kind is float or kind is complex:
            return kind, repr(value)
        if isinstance(value, (list, tuple)):
            return kind, tuple(map(self.of, value))
        if isinstance(value, dict):
            return dict, tuple((self.of(name), self.of(item)) for name, item in value.items())
        if kind is slice:
            return slice, self.of((value.start, value.stop, value.step))
        if isinstance(value, (*_BUILT_IN, enum.Enum)):
            return "identity", value
        return self._of_object(value)

    def _of_object(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, FakeTensor):
            key = self._metadata(value)
        elif isinstance(value, torch.Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(value):
                raise Unkeyed
            key = "constant", id(value)
        elif isinstance(value, fx.Node):
            return _uses(value)
        elif isinstance(value, functools.partial):
            return functools.partial, self.of((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            return types.MethodType, self.of((value.__func__, value.__self__))
        elif isinstance(value, types.FunctionType):
            return self._of_function(value)
        elif dataclasses.is_dataclass(value) and _is_own(type(value)):
            # A field that plays no part in comparisons holds what was worked out before.
            fields = [field.name for field in dataclasses.fields(value) if field.compare]
            key = type(value), tuple(self.of(getattr(value, name)) for name in fields)
            if not value.__dataclass_params__.frozen:
                return key
        else:
            raise Unkeyed
        # Kept with its key, so that no other object gets its id.
        self._known[id(value)] = value, key
        return key

    def _of_function(self, value: Callable[..., Any]) -> Any:
        if not _is_own(value):
            raise Unkeyed
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        if not cells and value.__defaults__ is None and not value.__kwdefaults__:
            return "identity", value.__code__
        return value.__code__, self.of((cells, value.__defaults__, value.__kwdefaults__))


def _number(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        if not isinstance(value.node, SymNode):
            raise Unkeyed
        return "symbol", value.node.expr
    return value


def _uses(node: fx.Node) -> Any:
    """All that a rule asks of a node itself: which of its results are used, where it has several."""
    several = isinstance(node.meta.get("val"), (list, tuple))
    return fx.Node, frozenset(str(user.args[1:]) for user in node.users) if several else None


def _is_own(value: Any) -> bool:
    return (value.__module__ or "").partition(".")[0] in _OWN


def _state() -> Any:
    """What a trace depends on besides the call."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Unkeyed
    autocast = [
        (torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(autocast)
