"""Checkpoints of models with vocabulary-parallel layers.

A model's own ``state_dict`` names the rows of each rank (DTensors), so that torch.distributed.checkpoint saves it and
loads it at another number of ranks. The states of an optimizer do not know of it: `optimizer_state_with_rows` tells
them, and `optimizer_state_without_rows` takes it back before they are loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import InputError
from .optimizers import ROWS
from .sharded import vocab_sharded_parameters


def dense_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of the model without vocabulary-parallel layers: whole tensors on every rank, the same names.

    Collective over the tensor-parallel group. ``model.save_pretrained(path, state_dict=dense_state_dict(model))`` on
    one rank writes what ``from_pretrained`` reads, the model compiled or wrapped by DDP or not: names are those of the
    plain model.
    """
    return {
        _plain(name): value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in _unwrapped(model).state_dict().items()
    }


def optimizer_state_with_rows(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """What ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` gives, the states of
    vocabulary-sharded parameters as DTensors that say which rows a rank holds.

    Without this every rank's rows would be saved under one name, and one rank's would win.

    Args:
        model: the model that the optimizer trains.
        state: the nested form, ``{"state": {name: {...}}, "param_groups": [...]}``; it is not changed.

    Raises:
        InputError: another form, or a state of a sharded parameter that is neither a number nor of its shape.
    """
    states, model = _states(state), _unwrapped(model)
    for long_name, module in vocab_sharded_parameters(model).items():
        if (name := _plain(long_name)) not in states:
            continue
        shape = model.get_parameter(long_name).shape
        states[name] = {key: _with_rows(module, name, key, value, shape) for key, value in states[name].items()}
    return _unmarked({**state, "state": states})


def optimizer_state_without_rows(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `optimizer_state_with_rows`: each rank's own rows, for ``set_optimizer_state_dict``."""
    states = {
        name: {key: v.to_local() if isinstance(v, DTensor) else v for key, v in values.items()}
        for name, values in _states(state).items()
    }
    return _unmarked({**state, "state": states})


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP and ``torch.compile``."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _plain(name: str) -> str:
    """The name that torch.distributed.checkpoint and ``from_pretrained`` know, also of a part that is compiled."""
    return name.replace("_orig_mod.", "")


def _unmarked(state: dict[str, Any]) -> dict[str, Any]:
    """Without the marks that say whose rows the states are of: with DTensors they are of all ranks."""
    if "param_groups" not in state:
        return state
    groups = [{key: value for key, value in group.items() if key != ROWS} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _states(state: Any) -> dict[str, Any]:
    states = state.get("state") if isinstance(state, dict) else None
    if not isinstance(states, dict) or any(not isinstance(name, str) for name in states):
        raise InputError(
            "an optimizer state by parameter name is expected: what get_optimizer_state_dict(model, optimizer) of "
            "torch.distributed.checkpoint.state_dict gives, not flattened"
        )
    return dict(states)


def _with_rows(module: Any, name: str, key: str, value: Any, shape: torch.Size) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or isinstance(value, DTensor):
        return value
    if value.shape != shape:
        raise InputError(
            f"the optimizer's {key!r} of {name} has shape {tuple(value.shape)}, the parameter {tuple(shape)}: which "
            "rows of the vocabulary it holds is unknown; use an optimizer whose states have their parameter's shape"
        )
    return module.as_dtensor(value)
