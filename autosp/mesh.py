"""The device mesh ``(dp, sp, tp)`` of a run, and what the rest of autosp needs to know about this rank's place in it.

``dp`` is outermost, so that a data parallel group spans machines; ``tp`` is innermost, so that the ranks which share a
vocabulary are neighbours. Everything is held by an `AutoSPState`; the module itself keeps nothing but which one is
current, so several meshes can live in one process::

    first = autosp.initialize({"sequence_parallel_size": 2})
    second = autosp.initialize({"sequence_parallel_size": 4})      # current from here on
    torch.compile(model, backend="autosp", options={"mesh": first})   # or: with autosp.mesh.use(first): ...
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakTensorKeyDictionary

from autosp.agreement import agree
from autosp.config import AutoSPConfig
from autosp.dynamo_settings import ignore_transformers_warnings, keep_graphs_whole_under_ddp
from autosp.errors import ConfigError, InputError, RankMismatchError
from autosp.weights import compare_weights

__all__ = ["AXES", "AutoSPState", "agree", "current", "initialize", "reset", "select", "shard_head", "use"]

AXES = ("dp", "sp", "tp")
NO_MODEL = (
    "tensor_parallel.vocab_parallel_lm_head is set, but initialize got no model: pass model=, or call "
    "autosp.shard_lm_head(model, state.mesh['tp']); until then every rank has the whole head"
)
DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, eq=False)
class AutoSPState:
    """One initialised mesh: the settings, and this rank's place on every axis. Made by `initialize`.

    The mappings have the keys "dp", "sp" and "tp". `mesh` and the group names are None in a process without a process
    group, where every size is 1.
    """

    config: AutoSPConfig
    """The settings, with all sizes set."""
    mesh: DeviceMesh | None
    """The DeviceMesh with dimension names ("dp", "sp", "tp")."""
    device_type: str
    """"cuda" or "cpu"."""
    sizes: Mapping[str, int]
    """Ranks along each axis."""
    coordinates: Mapping[str, int]
    """This rank's index along each axis."""
    ranks: Mapping[str, tuple[int, ...]]
    """The global ranks of this rank's group along each axis, in order."""
    group_names: Mapping[str, str | None]
    """The names by which functional collectives and our operators know this rank's groups."""
    check_ranks: tuple[int, ...]
    """The global ranks that must be given the same inputs: this rank's sequence group, and with a vocabulary-parallel
    head those that share its vocabulary too."""
    check_group: dist.ProcessGroup | None
    """A gloo group over `check_ranks` for comparisons on the host; None when there is nothing to compare. It is a group
    of its own, so that a comparison never meets a collective of the model, and so that it has its own time limit."""
    compared: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary, repr=False)
    """The weights that ranks of `check_group` were seen to hold alike, and where the watched ones began; see
    `autosp.weights`."""

    @property
    def sp_size(self) -> int:
        """Ranks that share one sequence."""
        return self.sizes["sp"]

    @property
    def sp_rank(self) -> int:
        """This rank's index in its sequence group: it holds the shard of this number."""
        return self.coordinates["sp"]

    @property
    def sp_group(self) -> str | None:
        """Name of this rank's sequence group."""
        return self.group_names["sp"]

    @property
    def has_vocabulary_axis(self) -> bool:
        """Whether the LM head is sharded over the vocabulary."""
        return self.config.vocab_parallel_lm_head and self.sizes["tp"] > 1


_current: AutoSPState | None = None
# So that options={"mesh": state.mesh} finds the state; holds nothing alive.
_known: weakref.WeakSet[AutoSPState] = weakref.WeakSet()


def initialize(
    config: str | os.PathLike[str] | Mapping[str, Any] | AutoSPConfig,
    *,
    model: torch.nn.Module | None = None,
    device_type: str | None = None,
) -> AutoSPState:
    """Read the settings, start the process group if torchrun started this process, and build the mesh.

    Collective: every rank of the world must call it, with the same settings. The state that it returns is current until
    the next call, which may build another mesh.

    Args:
        config: path of a DeepSpeed-style JSON, what such a file holds, or an `AutoSPConfig`.
        model: checked to be the same on every rank of a sequence group (names, shapes, dtypes, and a checksum of the
            values), since different weights would give a plausible and wrong loss. With
            ``tensor_parallel.vocab_parallel_lm_head`` and more than one rank in "tp" its LM head is then replaced by a
            vocabulary-parallel one, in place; see `autosp.shard_lm_head`.
        device_type: "cuda" or "cpu"; by default what the process group was made for, else "cuda" where there is one.

    Raises:
        ConfigError: a setting is wrong, the mesh does not cover the world, or the device is not there.
        RankMismatchError: `model` differs within a sequence group.
        InputError: the LM head of `model` cannot be sharded over the vocabulary; `model` is untouched then.
    """
    global _current
    ignore_transformers_warnings()
    world_size = _world_size()
    if isinstance(config, AutoSPConfig):
        config = config.for_world(world_size)
    else:
        config = AutoSPConfig.from_json(config, world_size)
    device_type = _device_type(device_type)
    _start_process_group(device_type)
    state = _build(config, device_type) if dist.is_initialized() else _alone(config, device_type)
    if state.sp_size > 1:
        keep_graphs_whole_under_ddp()
    if model is not None:
        if state.has_vocabulary_axis:
            shard_head(state, model)
        else:
            _check_model(state, model)
    elif state.has_vocabulary_axis:
        warnings.warn(NO_MODEL, stacklevel=2)
    _known.add(state)
    _current = state
    return state


def current() -> AutoSPState | None:
    """The state that a compilation uses; None before the first `initialize`."""
    return _current


def shard_head(state: AutoSPState, model: torch.nn.Module) -> None:
    """Compare `model` over the group and shard its LM head over "tp" as the settings say, in place. Collective.

    Raises:
        RankMismatchError: `model` differs within the group.
        InputError: its LM head cannot be sharded over the vocabulary; `model` is untouched then.
    """
    from autosp.layers import shard_lm_head

    assert state.mesh is not None
    _check_head(state, model)
    _check_model(state, model)
    shard_lm_head(
        model,
        state.mesh["tp"],
        embedding=state.config.vocab_parallel_embedding,
        ce_backend=state.config.vocab_parallel_ce_backend,
        verify_inputs=state.config.verify == "inputs",
    )


def reset() -> None:
    """Forget the current state. Process groups are not destroyed: they belong to torch.distributed."""
    global _current
    _current = None


@contextlib.contextmanager
def use(state: AutoSPState) -> Iterator[AutoSPState]:
    """Make `state` current inside a ``with`` block, for what is compiled (not what runs) there."""
    global _current
    if not isinstance(state, AutoSPState):
        raise InputError(f"use() takes the state that autosp.initialize returns, not {type(state).__name__}")
    before = _current
    _current = state
    try:
        yield state
    finally:
        _current = before


def select(options: Mapping[str, Any] | None = None) -> AutoSPState | None:
    """The state for one ``torch.compile(..., options=options)``: the mesh that it names or the current one, with its
    other options laid over the settings. None when nothing is initialised: the plain model is compiled.

    Args:
        options: settings of the JSON's "autosp" section, and "mesh": what `initialize` returned, or its `mesh`.

    Raises:
        ConfigError: an unknown option, a value that is not allowed, or a mesh that `initialize` did not build.
    """
    settings = dict(options or {})
    mesh = settings.pop("mesh", None)
    state = _current if mesh is None else _find(mesh)
    if state is None:
        AutoSPConfig().with_options(settings)  # a wrong option is wrong in a single process too
        return None
    return replace(state, config=state.config.with_options(settings)) if settings else state


def _find(mesh: object) -> AutoSPState:
    if isinstance(mesh, AutoSPState):
        return mesh
    for state in _known:
        if state.mesh is mesh:
            return state
    raise ConfigError(
        f"options['mesh'] is a {type(mesh).__name__} that autosp.initialize did not build; give the state that "
        "initialize returns, or that state's .mesh while the state is alive"
    )


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return 1


def _device_type(asked: str | None) -> str:
    """The device type of the mesh: the one asked for if the process group can serve it, else the group's own."""
    if asked is not None and asked not in DEVICE_TYPES:
        raise ConfigError(f"device_type is {asked!r}; allowed: {', '.join(map(repr, DEVICE_TYPES))}")
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device_type is 'cuda', but torch sees no CUDA device; use 'cpu' or leave it out")
    if not dist.is_initialized():
        return asked or ("cuda" if torch.cuda.is_available() else "cpu")
    # "cpu:gloo,cuda:nccl": one entry for each device type that the default group serves.
    backends = dict(entry.split(":", 1) for entry in dist.get_backend_config().split(","))
    if asked is not None and asked not in backends:
        raise ConfigError(
            f"device_type is {asked!r}, but the process group serves {', '.join(backends)} only; start it with "
            "init_process_group('cpu:gloo,cuda:nccl'), or let autosp.initialize start it"
        )
    return asked or ("cuda" if backends.get("cuda") == "nccl" else "cpu")


def _start_process_group(device_type: str) -> None:
    if dist.is_initialized() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return
    if device_type == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"this is local rank {local_rank}, but the machine has {torch.cuda.device_count()} CUDA devices; start "
                "at most one process a device, or pass device_type='cpu'"
            )
        torch.cuda.set_device(local_rank)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")


def _build(config: AutoSPConfig, device_type: str) -> AutoSPState:
    shape = (config.data_parallel_size, config.sequence_parallel_size, config.tensor_parallel_size)
    assert shape[0] is not None and shape[1] is not None
    mesh = init_device_mesh(device_type, (shape[0], shape[1], shape[2]), mesh_dim_names=AXES)
    groups = {axis: mesh.get_group(axis) for axis in AXES}
    if config.vocab_parallel_lm_head:
        rows = mesh.mesh.reshape(shape[0], -1).tolist()
    else:
        # transpose: rows of the sp axis, one for each (dp, tp); every rank of the world takes part in making all.
        rows = mesh.mesh.transpose(1, 2).reshape(-1, shape[1]).tolist()
    check_group = None
    if len(rows[0]) > 1 and dist.get_backend() != "fake":
        check_group, _ = dist.new_subgroups_by_enumeration(
            rows, timeout=timedelta(seconds=config.verify_timeout), backend="gloo", group_desc="autosp_check"
        )
    return AutoSPState(
        config=config,
        mesh=mesh,
        device_type=device_type,
        sizes=dict(zip(AXES, mesh.mesh.shape, strict=True)),
        coordinates={axis: mesh.get_local_rank(axis) for axis in AXES},
        ranks={axis: tuple(dist.get_process_group_ranks(group)) for axis, group in groups.items()},
        group_names={axis: group.group_name for axis, group in groups.items()},
        check_ranks=next(tuple(row) for row in rows if dist.get_rank() in row),
        check_group=check_group,
    )


def _alone(config: AutoSPConfig, device_type: str) -> AutoSPState:
    return AutoSPState(
        config=config,
        mesh=None,
        device_type=device_type,
        sizes=dict.fromkeys(AXES, 1),
        coordinates=dict.fromkeys(AXES, 0),
        ranks={axis: (0,) for axis in AXES},
        group_names=dict.fromkeys(AXES, None),
        check_ranks=(0,),
        check_group=None,
    )


def _check_head(state: AutoSPState, model: torch.nn.Module) -> None:
    from autosp.layers.lm_head import plan_lm_head

    try:
        plan_lm_head(model, embedding=state.config.vocab_parallel_embedding)
    except InputError:
        # The others must not wait for a rank that refuses what they accept; this rank's own error tells more.
        with contextlib.suppress(RankMismatchError):
            agree(state, "refused", b"")
        raise


def _check_model(state: AutoSPState, model: torch.nn.Module) -> None:
    compare_weights(state, dict([*model.named_parameters(), *model.named_buffers()]))
