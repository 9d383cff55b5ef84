"""Finding the LM head of a model and putting a vocabulary-parallel one in its place."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from ..errors import InputError
from . import alike, methods, registry
from .deferred import DeferredLogits
from .embedding import VocabParallelEmbedding, check_embedding
from .linear import VocabParallelLinear, is_vocab_sharded
from .losses import HeadLoss
from .partition import VocabGroup
from .sharded import vocab_sharded_modules

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule", "DeepSpeedEngine")


@dataclass(frozen=True)
class HeadPlan:
    """What will be replaced: the head by name, and the embedding that is tied to it, if it is to be sharded too."""

    name: str
    embedding: str | None = None


def shard_lm_head(
    model: nn.Module,
    tp_group: Any,
    *,
    embedding: bool = False,
    ce_backend: str = "torch",
    output: str = "dtensor",
    verify_inputs: bool = True,
) -> HeadPlan:
    """Replace the LM head of ``model``, in place, by a `VocabParallelLinear`; what ``autosp.initialize`` calls.

    The head is that of the model's tensor-parallel plan, or else ``get_output_embeddings()``, or else the one linear
    layer as wide as the vocabulary. The loss of the model's own forward becomes the vocabulary-parallel one.

    Args:
        model: a model with whole parameters, not wrapped or compiled.
        tp_group: as for `VocabParallelLinear`, of at least two ranks.
        embedding: shard an embedding that is tied to the head together with it; they stay one parameter.
        ce_backend: "fused_linear": the loss without logits; "torch", "liger": from sharded logits.
        output: as for `VocabParallelLinear`.
        verify_inputs: have the model, where it runs without the compiler, raise a RankMismatchError on every rank of
            the group when they are given different inputs; an all-gather of 32 bytes at each call.

    Raises:
        InputError: no head, several candidates, a tied head without ``embedding``, a head or embedding that is no plain
            layer, a model that is wrapped or sharded already. The model is untouched then.
    """
    group = VocabGroup(tp_group)
    plan = plan_lm_head(model, embedding=embedding)
    head = model.get_submodule(plan.name)
    new = VocabParallelLinear.from_linear(head, group, output=output)  # type: ignore[arg-type]
    if group.name and output == "dtensor" and _computes_its_loss_itself(model):
        warnings.warn(
            f"{type(model).__name__} computes its loss in its own forward, with operators that know of no shards: "
            'without the compiler its logits are gathered; torch.compile(model, backend="autosp") keeps them sharded',
            stacklevel=3,
        )
        new.output = "full"
    new.deferred = ce_backend == "fused_linear" and new.output == "dtensor"
    if plan.embedding is not None:
        table = VocabParallelEmbedding.from_embedding(model.get_submodule(plan.embedding), group)  # type: ignore[arg-type]
        new.weight = table.weight
        _put(model, plan.embedding, table)
    elif embedding:
        warnings.warn("vocab_parallel_embedding has no effect: the LM head is not tied to an embedding", stacklevel=3)
    _put(model, plan.name, new)
    _install_loss(model, new.deferred)
    if group.name:
        methods.install(model)
        if verify_inputs:
            alike.install(model, group.name)
    model.register_forward_hook(_finish_outputs, with_kwargs=True)
    return plan


def plan_lm_head(model: nn.Module, *, embedding: bool = False) -> HeadPlan:
    """Find what `shard_lm_head` replaces and refuse what it cannot; changes nothing."""
    _check_untouched(model)
    name = _find_head(model)
    head = model.get_submodule(name)
    if type(head) is not nn.Linear:
        raise InputError(
            f"the LM head {name!r} is a {type(head).__name__}; only a torch.nn.Linear can be sharded over the "
            "vocabulary (merge adapters, or leave vocab_parallel_lm_head out)"
        )
    if head._forward_hooks or head._forward_pre_hooks:
        raise InputError(f"the LM head {name!r} has forward hooks, which would be lost; register them afterwards")
    if head.bias is not None and (shared := _tied_to(model, f"{name}.bias", head.bias)):
        raise InputError(
            f"the bias of the LM head {name!r} is also {', '.join(map(repr, shared))}: sharding it would untie them. "
            "Give the head a bias of its own"
        )
    tied = _tied_to(model, f"{name}.weight", head.weight)
    if not tied:
        return HeadPlan(name)
    if not embedding:
        raise InputError(
            f"the LM head {name!r} is tied to {', '.join(map(repr, tied))}: sharding it alone would untie them. Set "
            'tensor_parallel "vocab_parallel_embedding": true to shard both together, or untie them '
            "(tie_word_embeddings=False)"
        )
    modules = sorted({path.rpartition(".")[0] for path in tied})
    if len(modules) != 1:
        raise InputError(f"the LM head {name!r} is tied to several modules, {modules}; only one embedding can be")
    try:
        check_embedding(model.get_submodule(modules[0]))
    except InputError as error:
        raise InputError(f"the LM head {name!r} is tied to {modules[0]!r}: {error}") from None
    return HeadPlan(name, modules[0])


def _check_untouched(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; a torch.nn.Module is expected")
    wrappers = {base.__name__ for module in model.modules() for base in type(module).__mro__} & set(_WRAPPERS)
    if wrappers:
        raise InputError(
            f"the model is wrapped already ({', '.join(sorted(wrappers))}), and a new head would not be part of the "
            "wrapper; call autosp.initialize(config, model=model) first"
        )
    sharded = list(vocab_sharded_modules(model))
    if sharded:
        raise InputError(f"the model has vocabulary-parallel layers already: {', '.join(sharded)}; initialize it once")
    dtensors = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if dtensors:
        raise InputError(
            f"parameters are DTensors already ({dtensors[0]} and {len(dtensors) - 1} more); shard the head before "
            "fully_shard or another tensor parallelism"
        )


def _find_head(model: nn.Module) -> str:
    for candidates, source in (
        (_from_tp_plan(model), "the tensor-parallel plan"),
        (_from_output_embeddings(model), "get_output_embeddings()"),
        (_from_sizes(model), "the linear layers as wide as the vocabulary"),
    ):
        if len(candidates) > 1:
            raise InputError(
                f"several layers may be the LM head, by {source}: {', '.join(candidates)}; give "
                "autosp.shard_lm_head a part of the model that has one"
            )
        if candidates:
            return candidates[0]
    raise InputError(
        f"{type(model).__name__} has no LM head: neither a tensor-parallel plan nor get_output_embeddings() names one, "
        "and no torch.nn.Linear is as wide as the vocabulary; leave vocab_parallel_lm_head out"
    )


def _from_tp_plan(model: nn.Module) -> list[str]:
    """Layers outside the blocks that a plan of transformers cuts by columns: ``{"lm_head": "colwise_..."}``."""
    plan = getattr(model, "_tp_plan", None)
    if not isinstance(plan, dict):
        return []
    sizes, found = _vocabulary_sizes(model), []
    for name, style in plan.items():
        if "*" in name or not str(style).startswith("colwise"):
            continue
        try:
            module = model.get_submodule(name)
        except AttributeError:
            continue
        if getattr(module, "out_features", None) in sizes:
            found.append(name)
    return found


def _from_output_embeddings(model: nn.Module) -> list[str]:
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return [name for name, module in model.named_modules() if head is not None and module is head]


def _from_sizes(model: nn.Module) -> list[str]:
    sizes = _vocabulary_sizes(model)
    return [
        name for name, module in model.named_modules() if type(module) is nn.Linear and module.out_features in sizes
    ]


def _vocabulary_sizes(model: nn.Module) -> set[int]:
    config = getattr(model, "config", None)
    get = getattr(config, "get_text_config", None)
    size = getattr(get() if callable(get) else config, "vocab_size", None)
    if isinstance(size, int):
        return {size}
    return {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}


def _tied_to(model: nn.Module, mine: str, weight: torch.Tensor) -> list[str]:
    """Names of other parameters than ``mine`` that are the tensor ``weight``, or share its memory."""
    found = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name != mine and (parameter is weight or _share_memory(parameter, weight)):
            found.append(name)
    return found


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.untyped_storage()._cdata == b.untyped_storage()._cdata:
        return True
    # Two storages may be made over one piece of memory; without data (meta, fake, empty) there is none.
    known = [not isinstance(x, FakeTensor) and not x.is_meta and x.numel() > 0 for x in (a, b)]
    return all(known) and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    registry.replace(model.get_submodule(name))
    setattr(model.get_submodule(parent), child, module)


def _computes_its_loss_itself(model: nn.Module) -> bool:
    """Whether a transformers model takes labels and never looks at the ``loss_function`` that is exchanged."""
    if not isinstance(getattr(type(model), "loss_function", None), property):
        return False
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return code is not None and "labels" in code.co_varnames and "loss_function" not in code.co_names


def _install_loss(model: Any, fused: bool) -> None:
    """Wrap the ``loss_function`` of a transformers model; other models call a loss module of ours themselves."""
    if not isinstance(getattr(type(model), "loss_function", None), property):
        return
    from transformers.loss import loss_utils

    original = model.loss_function
    shifts = {loss_utils.ForCausalLMLoss: True, loss_utils.ForMaskedLMLoss: False}.get(original)
    model.loss_function = HeadLoss(original, shifts, fused)


def _finish_outputs(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """What a forward returns in place of its logits.

    Without gradient and without labels they are gathered: generation and evaluation code gets the plain tensor that it
    expects. Logits that a fused loss never made are None; others stay DTensors.
    """
    if torch.compiler.is_compiling():
        return output
    has_loss = kwargs.get("labels") is not None or getattr(output, "loss", None) is not None
    whole = not torch.is_grad_enabled() and not has_loss and not getattr(module, "_keeps_logits_sharded", False)

    def finish(value: Any) -> Any:
        if isinstance(value, DeferredLogits):
            if has_loss and not value.is_computed:
                return None
            value = value.logits()
        return value.full_tensor() if whole and is_vocab_sharded(value) else value

    if isinstance(output, tuple):
        values = [finish(value) for value in output]
        return type(output)(*values) if hasattr(output, "_fields") else tuple(values)
    if isinstance(output, dict):
        for key, value in list(output.items()):
            finished = finish(value)
            if finished is not value:
                output[key] = finished
        return output
    return finish(output)


@contextmanager
def sharded_logits(model: nn.Module) -> Iterator[None]:
    """Inside the block a model gives sharded logits (DTensors) without gradient and labels too, where it gives gathered
    ones otherwise: for log-probabilities of a policy before its update, say.
    """
    model._keeps_logits_sharded = True  # type: ignore[assignment]
    try:
        yield
    finally:
        del model._keeps_logits_sharded
