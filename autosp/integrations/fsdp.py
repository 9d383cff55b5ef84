"""A compiled model under FSDP2: parameters sharded over data and sequence parallel ranks together.

FSDP2 averages gradients over the ranks of its mesh, here all of them, so parameters' gradients leave the backward as
each rank's part times the size of the sequence group ("engine_mean"): no traffic beside FSDP2's reduce-scatter.

With one unit (the whole model) there is one graph. With a unit for each layer, FSDP2 gathers and frees weights around
each layer, so each layer is a graph of its own, the same one for all layers of a class; what flows between them stays
sharded over the sequence, as DTensors. Everything else that sees such a value (final norm, head, loss) is compiled too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as _fully_shard
from torch.utils._pytree import tree_leaves

from autosp.errors import InputError
from autosp.inputs import read_tag
from autosp.integrations._prepare import check_model, compile_modules, find_state, reduction_for_mean
from autosp.mesh import AutoSPState
from autosp.sequence_tensor import SequenceTensor, shard

_NAME = "autosp.integrations.fsdp"
_STARTS = ("input_ids", "inputs_embeds")


def parameter_mesh(state: AutoSPState | None = None) -> DeviceMesh:
    """The one-dimensional mesh "dp_sp" of all ranks, over which FSDP2 shards parameters and averages gradients.

    Raises:
        InputError: `autosp.initialize` was not called, or there is no process group.
        ConfigError: the mesh has a vocabulary axis.
    """
    found = find_state(state, _NAME)
    return init_device_mesh(found.device_type, (dist.get_world_size(),), mesh_dim_names=("dp_sp",))


def fully_shard(
    model: torch.nn.Module,
    *,
    layers: Sequence[torch.nn.Module] | None = None,
    shard_embedding: bool = True,
    state: AutoSPState | None = None,
    options: Mapping[str, Any] | None = None,
    **fsdp: Any,
) -> FSDPModule:
    """Shard the parameters of `model` over all ranks with FSDP2 and compile it with the backend "autosp", in place.

    Make the optimizer afterwards, over ``model.parameters()``, which are DTensors then. Clip with
    ``torch.nn.utils.clip_grad_norm_``: the norm is that of the whole gradient. Checkpoints of
    ``torch.distributed.checkpoint`` load at any other number of ranks.

    Args:
        model: not compiled, not sharded, with the same weights on every rank.
        layers: None: one FSDP unit and one graph. Else the layers that become units of their own, each called with its
            hidden states ``(batch, sequence, ...)`` as first argument or as ``hidden_states``; for transformers models
            ``model.model.layers``.
        shard_embedding: with `layers`: compute the embedding of this rank's tokens only. False where the model adds
            something whole to it outside its layers, as GPT-2 does with its position embeddings; then each rank holds
            the embedding of all tokens once.
        state: as `autosp.initialize` returns it; by default the latest.
        options: settings for this model, laid over those of `autosp.initialize`.
        fsdp: further arguments of FSDP2's ``fully_shard`` for every unit (``mp_policy``, ``offload_policy``,
            ``reshard_after_forward``, ...), ``mesh`` excepted.

    Raises:
        InputError: the model is compiled or sharded already, a layer is none of its modules, a mesh is given, or
            `autosp.initialize` was not called.
        ConfigError: the settings ask for a gradient reduction that does not fit, or the mesh has a vocabulary axis.
    """
    found = find_state(state, _NAME)
    check_model(model, _NAME)
    reduction = reduction_for_mean(found, _NAME, options)
    units = [] if layers is None else list(layers)
    _check(model, units, fsdp)
    mesh = parameter_mesh(found)
    settings = {**dict(options or {}), "gradient_reduction": reduction}
    found.config.with_options(settings)
    if layers is None:
        compile_modules([model], found, reduction=reduction, options=options)
        return _fully_shard(model, mesh=mesh, **fsdp)
    if found.sp_size > 1:
        _compile_parts(model, units, found, settings, shard_embedding)
    else:
        compile_modules(units, found, reduction=reduction, options=options)
    for unit in units:
        _fully_shard(unit, mesh=mesh, **fsdp)
    return _fully_shard(model, mesh=mesh, **fsdp)


def _check(model: torch.nn.Module, units: list[torch.nn.Module], fsdp: Mapping[str, Any]) -> None:
    if "mesh" in fsdp:
        raise InputError(
            f"{_NAME}: a mesh is given, but parameters must be sharded over all data and sequence parallel ranks "
            "together; leave mesh out"
        )
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if sharded:
        raise InputError(f"{_NAME}: the module {sharded[0]!r} is sharded by FSDP2 already; give the plain model")
    inside = set(model.modules())
    for index, unit in enumerate(units):
        if not isinstance(unit, torch.nn.Module) or unit not in inside or unit is model:
            raise InputError(f"{_NAME}: layers[{index}] is a {type(unit).__name__} that is no module inside the model")
    nested = [unit for unit in units if any(unit is not other and unit in set(other.modules()) for other in units)]
    if nested:
        raise InputError(f"{_NAME}: a {type(nested[0]).__name__} among the layers is inside another one of them")


def _compile_parts(
    model: torch.nn.Module,
    units: list[torch.nn.Module],
    state: AutoSPState,
    settings: Mapping[str, Any],
    shard_embedding: bool,
) -> None:
    """Compile layers, and what runs around them for the calls that get a sharded value.

    ``forward`` is compiled, not the call: FSDP2's hooks then run outside of every graph. One compiled function serves
    all modules of a class, which is what makes it one graph for all layers.
    """
    options = {**settings, "mesh": state}
    assert state.mesh is not None
    mesh = state.mesh["sp"]
    compiled: dict[Any, Callable[..., Any]] = {}

    def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
        if function not in compiled:
            compiled[function] = torch.compile(function, backend="autosp", options=options)
        return compiled[function]

    for unit in units:
        unit.forward = _Layer(unit, compile_once(type(unit).forward), mesh)
    for module in _around(model, set(units)):
        forward = type(module).forward
        module.forward = _Around(module, forward, compile_once(forward), shard_embedding)
    for module in model.modules():
        # The loss of transformers models, a function that their forward calls.
        function = getattr(module, "loss_function", None)
        if callable(function) and isinstance(getattr(type(module), "loss_function", None), property):
            setattr(module, "loss_function", _Loss(function, compile_once(function)))  # noqa: B010 - a property


def _around(module: torch.nn.Module, units: set[torch.nn.Module]) -> list[torch.nn.Module]:
    """The largest modules that hold no layer and are in none."""
    found = []
    for child in module.children():
        if child in units:
            continue
        if units.isdisjoint(child.modules()):
            found.append(child)
        else:
            found += _around(child, units)
    return found


def _is_sharded(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return any(isinstance(leaf, SequenceTensor) for leaf in tree_leaves((args, dict(kwargs))))


class _Layer:
    """``forward`` of a layer: its hidden states come in sharded, or are cut here."""

    def __init__(self, module: torch.nn.Module, compiled: Callable[..., Any], mesh: DeviceMesh) -> None:
        self.module, self.compiled, self.mesh = module, compiled, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _is_sharded(args, kwargs):
            if args:
                args = (self._cut(args[0]), *args[1:])
            else:
                kwargs["hidden_states"] = self._cut(kwargs.get("hidden_states"))
        return self.compiled(self.module, *args, **kwargs)

    def _cut(self, hidden: Any) -> SequenceTensor:
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point() or hidden.dim() < 3:
            got = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else type(hidden).__name__
            raise InputError(
                f"{_NAME}: a {type(self.module).__name__} was called with {got} where its hidden states (batch, "
                "sequence, features) are expected, as first argument or as hidden_states"
            )
        return shard(hidden, self.mesh, 1)


class _Around:
    """``forward`` of a module outside the layers: compiled for sharded values, as it is for whole ones."""

    def __init__(
        self, module: torch.nn.Module, plain: Callable[..., Any], compiled: Callable[..., Any], embeds: bool
    ) -> None:
        self.module, self.plain, self.compiled = module, plain, compiled
        self.embeds = embeds and isinstance(module, torch.nn.Embedding)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        starts = self.embeds and any((read_tag(leaf) or ("",))[0] in _STARTS for leaf in tree_leaves((args, kwargs)))
        function = self.compiled if starts or _is_sharded(args, kwargs) else self.plain
        return function(self.module, *args, **kwargs)


class _Loss:
    """A loss function: compiled for sharded logits."""

    def __init__(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self.plain, self.compiled = plain, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.compiled if _is_sharded(args, kwargs) else self.plain)(*args, **kwargs)
