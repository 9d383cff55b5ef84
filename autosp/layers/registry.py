"""Which tensors of this process hold some rows of a vocabulary only: what looks at all parameters must know."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .sharded import VocabShardedModule

# Weak, so that nothing is kept alive; a layer, not its parameters, since those are replaced and copied.
_LAYERS: weakref.WeakSet[VocabShardedModule] = weakref.WeakSet()
# Whole parameters that a model had before its head was sharded; an optimizer may hold them still.
_REPLACED: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_changes = itertools.count(1)
_version = 0


def watch(layer: VocabShardedModule) -> None:
    """Remember a layer whose rows are sharded over more than this rank."""
    _LAYERS.add(layer)
    _renew()


def replace(module: torch.nn.Module) -> None:
    """Remember the parameters of a layer in whose place a sharded one stands."""
    _REPLACED.update({id(parameter): parameter for parameter in module.parameters()})
    _renew()


def was_replaced(parameter: torch.Tensor) -> bool:
    """Whether a model had this parameter before its head was sharded."""
    return _REPLACED.get(id(parameter)) is parameter


def version() -> int:
    """Another number whenever what is known here has changed."""
    return _version


def _renew() -> None:
    global _version
    _version = next(_changes)


def sharded_rows() -> Iterator[tuple[torch.nn.Parameter, str]]:
    """Every parameter that holds rows, with the name of its tensor-parallel group; in no order."""
    for layer in list(_LAYERS):
        group = layer.tp_group
        for name in layer.sharded_names():
            parameter = layer._parameters[name]
            if group is not None and parameter is not None:
                yield parameter, group


def gradient_groups() -> dict[Any, str]:
    """The tensor-parallel group of each gradient that is one of rows, by the gradient's `key`."""
    return {key(parameter.grad): group for parameter, group in sharded_rows() if parameter.grad is not None}


def parameter_groups() -> dict[Any, str]:
    """The tensor-parallel group of each parameter that holds rows, by the parameter's `key`."""
    return {key(parameter): group for parameter, group in sharded_rows()}


def parameter_rows() -> dict[Any, str]:
    """In words, which rows each parameter that holds some has on this rank, by the parameter's `key`."""
    layers = [layer for layer in list(_LAYERS) if layer.tp_group is not None]
    return {key(getattr(layer, name)): str(layer.partition) for layer in layers for name in layer.sharded_names()}


def groups_in(model: torch.nn.Module) -> set[str]:
    """The tensor-parallel groups of the layers of a model, and of parameters that it holds without the layer."""
    layers = {layer.tp_group for layer in model.modules() if layer in _LAYERS}
    known = parameter_groups()
    parameters = {known[key(parameter)] for parameter in model.parameters() if key(parameter) in known}
    return parameters | {group for group in layers if isinstance(group, str)}


def key(tensor: torch.Tensor) -> Any:
    """What a tensor and its ``detach()`` have in common: their memory, or, where there is none, the object itself."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() and tensor.device.type != "meta":
        return tensor.data_ptr(), tensor.shape, tensor.dtype
    return id(tensor)
