"""What every integration does before it hands a model to its engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autosp import mesh
from autosp.errors import ConfigError, InputError
from autosp.mesh import AutoSPState

FITS_A_MEAN_OVER_THE_WORLD = ("engine_mean", "graph")


def find_state(state: AutoSPState | None, engine: str, *, alone: bool = False) -> AutoSPState:
    """`state`, or the one of the latest `autosp.initialize`, if an engine over all ranks of the world fits it.

    Raises:
        InputError: there is none, it is no state, or its process group is not there (which `alone` allows).
        ConfigError: the mesh splits the vocabulary, so that the ranks of the world do not hold the same parameters.
    """
    found = mesh.current() if state is None else state
    if found is None:
        raise InputError(f"{engine}: call autosp.initialize(config) first, it builds the mesh of the ranks")
    if not isinstance(found, AutoSPState):
        raise InputError(f"{engine}: state is a {type(found).__name__}; give what autosp.initialize returns")
    if found.mesh is None and not alone:
        raise InputError(
            f"{engine}: there is no process group; start the script with torchrun, or call init_process_group before "
            "autosp.initialize"
        )
    if found.sizes["tp"] > 1:
        raise ConfigError(
            f"{engine}: the mesh has a vocabulary axis of {found.sizes['tp']} ranks, over which an engine must not "
            'average; take "tensor_parallel" out of the configuration'
        )
    return found


def reduction_for_mean(state: AutoSPState, engine: str, options: Mapping[str, Any] | None) -> str:
    """The gradient reduction for an engine that averages over the world: "engine_mean" unless the user wants "graph".

    Raises:
        ConfigError: the settings ask for a reduction that such an engine would get wrong.
    """
    asked = dict(options or {}).get("gradient_reduction")
    if asked is None and "gradient_reduction" in state.config.model_fields_set:
        asked = state.config.gradient_reduction
    if asked is None:
        return "engine_mean"
    if asked not in FITS_A_MEAN_OVER_THE_WORLD:
        raise ConfigError(
            f"gradient_reduction is {asked!r}, but {engine} averages gradients over all ranks; allowed: 'engine_mean' "
            "(what it is without the setting) and 'graph'"
        )
    return asked


def check_model(model: torch.nn.Module, engine: str) -> None:
    """Refuse what is no plain, uncompiled module.

    Raises:
        InputError: with what to give instead.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"{engine}: model is a {type(model).__name__}; a torch.nn.Module is expected")
    compiled = compiled_modules(model)
    if compiled:
        where = f"its module {compiled[0]!r}" if compiled[0] else "it"
        raise InputError(
            f"{engine}: the model is compiled already ({where}), so how its gradients are reduced is settled; give the "
            "model without torch.compile: it is compiled here"
        )


def compiled_modules(model: torch.nn.Module) -> list[str]:
    """The names of the modules of `model` that are compiled; "" is the model itself."""
    return [name for name, module in model.named_modules() if _is_compiled(module)]


def compile_modules(
    modules: Sequence[torch.nn.Module],
    state: AutoSPState,
    *,
    reduction: str,
    options: Mapping[str, Any] | None,
    compile_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Compile each module in place, for `state` and with one gradient reduction; names in state dicts stay.

    Raises:
        ConfigError: an unknown option or a value that is not allowed.
    """
    settings = {**dict(options or {}), "gradient_reduction": reduction}
    settings.pop("mesh", None)
    state.config.with_options(settings)
    for module in modules:
        module.compile(backend="autosp", options={**settings, "mesh": state}, **dict(compile_kwargs or {}))


def _is_compiled(module: torch.nn.Module) -> bool:
    optimized = isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
    return optimized or getattr(module, "_compiled_call_impl", None) is not None
