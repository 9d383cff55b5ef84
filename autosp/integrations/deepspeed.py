"""A compiled model under DeepSpeed's engine, with the JSON that a DeepSpeed user has.

Left to itself the released engine (0.19) averages gradients over all ranks; but a ``data_parallel_size`` or a
``mesh_param`` beside ``sequence_parallel_size`` makes it reduce over data parallelism alone, so that the ranks of a
sequence group drift apart without an error. `initialize` takes those keys over: autosp builds the mesh from them, and
the engine gets a JSON without them and averages over all ranks, which gradients of "engine_mean" (and of "graph") fit.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import autosp
from autosp import mesh
from autosp.config import AutoSPConfig, read_json
from autosp.errors import ConfigError, InputError
from autosp.integrations._prepare import check_model, compile_modules, find_state, reduction_for_mean
from autosp.mesh import AutoSPState

_NAME = "autosp.integrations.deepspeed"
_SIZES = ("sequence_parallel_size", "data_parallel_size", "mesh_param")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def initialize(
    *,
    model: torch.nn.Module,
    config: str | os.PathLike[str] | Mapping[str, Any],
    mpu: Any = None,
    mesh_param: tuple[int, int] | None = None,
    state: AutoSPState | None = None,
    options: Mapping[str, Any] | None = None,
    **engine: Any,
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` for a model whose sequences are split over the ranks of a group.

    Builds the mesh from the JSON unless `autosp.initialize` was called, compiles the model in place, and starts the
    engine. ZeRO stages 0, 1 and 2. ``engine(**batch)``, ``engine.backward(loss)`` and ``engine.step()`` as usual, with
    a batch that is the same on all ranks of a sequence group; ``engine.compile(backend="autosp")`` is right too.

    Batch sizes in the JSON count as DeepSpeed has it: ``train_batch_size`` is ``train_micro_batch_size_per_gpu`` x
    ``gradient_accumulation_steps`` x data-parallel groups. The engine itself counts ranks, so its
    ``train_batch_size()`` is larger by the size of the sequence group.

    Args:
        model: not compiled.
        config: path of the JSON, or what it holds; an ``"autosp"`` section may be in it.
        mpu: accepted where its sizes are those of the mesh; not handed on, since its groups are autosp's here.
        mesh_param: ``(data_parallel_size, sequence_parallel_size)``, as DeepSpeed takes it.
        state: as `autosp.initialize` returns it; by default the latest.
        options: settings for this model, laid over the JSON's.
        engine: further arguments of ``deepspeed.initialize``, ``training_data`` excepted.

    Returns:
        What ``deepspeed.initialize`` returns: engine, optimizer, None, scheduler.

    Raises:
        ConfigError: sizes that contradict each other or the mesh, ZeRO stage 3, fp16 without ZeRO, gradients summed
            instead of averaged, DeepCompile passes, batch sizes that do not fit, or another setting that would be
            wrong; DeepSpeed is older than 0.19.
        InputError: the model is compiled already or a pipeline, or ``training_data`` is given.
    """
    tree = copy.deepcopy(dict(read_json(config)))
    if mesh_param is not None:
        if "mesh_param" in tree and list(tree["mesh_param"]) != list(mesh_param):
            raise ConfigError(f"{_NAME}: mesh_param is {list(mesh_param)}, in the JSON {tree['mesh_param']}")
        tree["mesh_param"] = list(mesh_param)
    _check_engine(tree, engine)
    check_model(model, _NAME)
    found = _mesh_of(tree, state)
    if mpu is not None:
        _check_mpu(mpu, found)
    reduction = reduction_for_mean(found, _NAME, options)
    engine_config = _engine_config(tree, found)
    import deepspeed

    _check_version(deepspeed)
    if isinstance(model, deepspeed.PipelineModule):
        raise InputError(f"{_NAME}: a PipelineModule is given; pipeline parallelism is not served, give a plain module")
    compile_modules([model], found, reduction=reduction, options=options)
    return deepspeed.initialize(model=model, config=engine_config, **engine)


def _check_engine(tree: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    """Refuse what the engine would get wrong with sequence groups."""
    stage = _stage(tree)
    if str(stage) not in ("0", "1", "2"):  # DeepSpeed takes the number as text too
        raise ConfigError(
            f"{_NAME}: zero_optimization.stage is {stage}, which is not supported (hooks of stage 3 gather weights "
            "inside the compiled program). Use stage 0, 1 or 2, or autosp.integrations.fsdp to shard weights too"
        )
    fp16 = tree.get("fp16") or {}
    trains = engine.get("optimizer") is not None or tree.get("optimizer") is not None
    if str(stage) == "0" and trains and fp16.get("enabled"):
        # Its backward scales the loss for ZeRO's optimizers only, and its step divides by the scale all the same.
        raise ConfigError(
            f"{_NAME}: fp16 is enabled without ZeRO (zero_optimization.stage 0), where DeepSpeed 0.19 does not scale "
            "the loss but divides the gradients by the scale, so that weights hardly move; use stage 1 or 2, or bf16"
        )
    if tree.get("gradient_allreduce_op", "mean") != "mean":
        raise ConfigError(
            f"{_NAME}: gradient_allreduce_op is {tree['gradient_allreduce_op']!r}; gradients must be averaged: 'mean'"
        )
    compile_section = tree.get("compile") or {}
    passes = [name for name in compile_section.get("passes") or () if name != "autosp"]
    if compile_section.get("deepcompile") and (passes or "autosp" not in (compile_section.get("passes") or ())):
        raise ConfigError(
            f"{_NAME}: compile.deepcompile is on with passes {passes or 'that DeepSpeed chooses'}, which rewrite the "
            "graph that autosp compiles; leave deepcompile out"
        )
    if engine.get("training_data") is not None:
        raise InputError(
            f"{_NAME}: training_data is given, but DeepSpeed's loader hands every rank another batch; make a loader "
            "with autosp.data"
        )


def _check_version(deepspeed: Any) -> None:
    """Refuse engines before 0.19: some of 0.18 divide bf16 gradients by a loss scale that they have not applied."""
    if (deepspeed.__version_major__, deepspeed.__version_minor__) < (0, 19):
        raise ConfigError(
            f"{_NAME}: DeepSpeed {deepspeed.__version__} is installed; 0.19 or later is needed: pip install -U "
            "deepspeed"
        )


def _stage(tree: Mapping[str, Any]) -> Any:
    zero = tree.get("zero_optimization") or {}
    if isinstance(zero, Mapping):
        return zero.get("stage", 0)
    return 1  # true, as older JSONs have it


def _mesh_of(tree: Mapping[str, Any], state: AutoSPState | None) -> AutoSPState:
    current = mesh.current() if state is None else state
    if current is None:
        return find_state(autosp.initialize(tree), _NAME)
    found = find_state(current, _NAME)
    if any(name in tree for name in _SIZES):
        asked = AutoSPConfig.from_json(tree, dist.get_world_size())
        for name, axis in (("sequence_parallel_size", "sp"), ("data_parallel_size", "dp")):
            if getattr(asked, name) != found.sizes[axis]:
                raise ConfigError(
                    f"{_NAME}: {name} is {getattr(asked, name)} in the JSON, but the mesh of autosp.initialize has "
                    f"{found.sizes[axis]}; give both the same JSON"
                )
    return found


def _check_mpu(mpu: Any, state: AutoSPState) -> None:
    for method, axis, size in (
        ("get_sequence_parallel_world_size", "sequence", state.sizes["sp"]),
        ("get_data_parallel_world_size", "data", state.sizes["dp"]),
        ("get_model_parallel_world_size", "model", 1),
        ("get_tensor_model_parallel_world_size", "tensor model", 1),
    ):
        getter = getattr(mpu, method, None)
        if getter is not None and getter() != size:
            raise ConfigError(
                f"{_NAME}: the mpu has {getter()} {axis} parallel ranks, the mesh of autosp {size}; leave the mpu out, "
                "or make it agree with the JSON"
            )
    if not hasattr(mpu, "get_sequence_parallel_world_size"):
        raise ConfigError(
            f"{_NAME}: the mpu says nothing of sequence parallelism; leave it out: autosp makes the groups"
        )


def _engine_config(tree: Mapping[str, Any], state: AutoSPState) -> dict[str, Any]:
    """The JSON for an engine that averages over all ranks: without the keys that autosp takes over."""
    ours = (*_SIZES, "autosp", "tensor_parallel", *_BATCH)
    config = {name: value for name, value in tree.items() if name not in ours}
    if isinstance(tree.get("compile"), Mapping):
        kept = {name: value for name, value in tree["compile"].items() if name not in ("deepcompile", "passes")}
        config["compile"] = kept
    micro, accumulation = _batch_sizes(tree, state.sizes["dp"])
    config["train_micro_batch_size_per_gpu"] = micro
    config["gradient_accumulation_steps"] = accumulation
    return config


def _batch_sizes(tree: Mapping[str, Any], dp: int) -> tuple[int, int]:
    """Micro-batch and accumulation, a missing one by DeepSpeed's rule with `dp` in place of its world size.

    Raises:
        ConfigError: a size is no positive integer, or the three do not fit.
    """
    given = {name: tree[name] for name in _BATCH if tree.get(name) is not None}
    wrong = {name: value for name, value in given.items() if type(value) is not int or value < 1}
    if wrong or not given:
        got = ", ".join(f"{name} is {value!r}" for name, value in wrong.items()) or "the JSON has none of them"
        raise ConfigError(f"{_NAME}: {got}; positive integers are expected for {' and '.join(_BATCH[:2])}")
    total, micro, accumulation = (given.get(name) for name in _BATCH)
    if micro is None and total is None:
        raise ConfigError(f"{_NAME}: {_BATCH[2]} is given alone; add {_BATCH[1]}")
    if micro is None:
        assert total is not None
        micro = total // dp // (accumulation or 1)
    if accumulation is None:
        accumulation = 1 if total is None else max(1, total // (micro * dp)) if micro else 1
    if micro < 1 or (total is not None and total != micro * accumulation * dp):
        raise ConfigError(
            f"{_NAME}: train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {accumulation} x {dp} data-parallel groups"
        )
    return micro, accumulation
