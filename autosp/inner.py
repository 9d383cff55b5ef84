"""The inner compiler of a local program, with the settings of torch that matter for long sequences.

Memory and overlap are torch's own where they can be: its partitioner chooses what to save under a budget, its scheduler
moves the waits of collectives. Here they are switched on, for the programs of this package and no others.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo import lookup_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

from .config import AutoSPConfig
from .fit_memory import FitMemory
from .gradient_sums import JoinGradientSums
from .host_copy_order import place_host_copies
from .layout.attention.kernels import find_kernel
from .offload import OffloadSaved
from .product_order import KeepProductsInOrder

log = logging.getLogger("autosp")

_ATTENTION = ("aten::scaled_dot_product_attention", "autosp::block_attention", "autosp::ring_attention")
# What has collectives inside that the partitioner, which never runs its own again, does not see.
_OPAQUE_LOSSES = (
    "autosp::linear_cross_entropy_loss",
    "autosp::linear_cross_entropy_sums",
    "autosp::vocab_row_stats",
    "autosp::vocab_kl",
    "autosp::vocab_jsd",
    "autosp::vocab_sum_over_group",
)


def compile_local(
    graph: fx.GraphModule,
    examples: list[Any],
    config: AutoSPConfig,
    compiler: Callable[..., Any] | None = None,
    fit: FitMemory | None = None,
) -> Callable[..., Any]:
    """Compile the program of one rank.

    Args:
        graph: the local program, not yet differentiated.
        examples: its inputs, as Dynamo gives them to a backend.
        config: ``inner_backend``, ``activation_memory_budget``, ``checkpointing_keeps``,
            ``activation_offloading`` and ``overlap_communication`` are read.
        compiler: takes the place of the inner backend, called as Inductor is where that is the inner backend.
        fit: chooses the budget where it is "auto".

    Raises:
        StepTooLarge: ``fit`` must find a budget, and there is none.
    """
    run: Callable[..., Any] = compiler or lookup_backend(config.inner_backend)
    keeps = config.checkpointing_keeps == "attention"
    # A budget may also be the user's own setting of torch, which is left as it is where ours is 1.
    if keeps or config.activation_memory_budget == "auto" or _budget(config) < 1:
        kept = keep_attention_and_losses(graph, checkpointed=keeps)
        if keeps and not kept and torch.is_grad_enabled():
            _warn_nothing_kept(graph)
    name_marked(graph)
    partitioner = fit if fit is not None else OffloadSaved() if config.activation_offloading is True else None
    if partitioner is not None and config.inner_backend == "aot_eager" and compiler is None:
        run = aot_autograd(fw_compiler=boxed_nop, partition_fn=partitioner, keep_inference_input_mutations=True)
    with _partitioner_settings(config, partitioner):
        if config.inner_backend != "inductor":
            return run(graph, examples)
        return run(graph, examples, config_patches=_inductor_settings(config, partitioner, examples))


def _budget(config: AutoSPConfig) -> float:
    ours = config.activation_memory_budget
    return functorch_config.activation_memory_budget if ours in ("auto", 1) else float(ours)


def keep_attention_and_losses(graph: fx.GraphModule, *, checkpointed: bool) -> int:
    """Have the partitioner save what attention gives: a budget recomputes what is cheap, and this grows with S².

    A fused loss has settled what it keeps. Run again it would multiply by the whole head once more, and over a group
    issue collectives that the partitioner does not see, on those ranks alone whose shard it found worth it. Losses of a
    head that ranks share have such collectives too.

    Args:
        checkpointed: attention also inside the bodies of the model's own checkpointing, which are recomputed otherwise.

    Returns:
        How many attentions inside such bodies are kept.
    """
    kept = 0
    for node in graph.graph.nodes:
        own = "recompute" not in node.meta
        attends = is_attention(node) and (checkpointed or own)
        if attends or own and _name(node) in _OPAQUE_LOSSES:
            kept += attends and not own
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return kept


def name_marked(graph: fx.GraphModule) -> None:
    """Have names of nodes say what the partitioner is told of them: kept or computed again, and in which region.

    AOTAutograd's cache tells programs apart by a graph's text, which marks are not in. Dynamo gives checkpointing as an
    operator with a body; in this package's graphs it is marks alone. A model that was once compiled without
    checkpointing would be served that program with it, from the disk and in later runs too, and save everything.
    """
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            marked = [node for node in module.graph.nodes if "recompute" in node.meta]
            # Regions are counted over the process; the partitioner asks which of two came first.
            regions = sorted({node.meta.get("ac_graph_id", 0) for node in marked})
            for node in marked:
                policy, region = node.meta["recompute"], regions.index(node.meta.get("ac_graph_id", 0))
                node._rename(f"{node.name}_{getattr(policy, 'name', policy)}_{region}".lower())
            if marked:
                module.recompile()


def _warn_nothing_kept(graph: fx.GraphModule) -> None:
    """Say why, in a graph that has layers of a model; one of embeddings alone has nothing to keep."""
    if any(map(is_attention, graph.graph.nodes)):
        why = "it attends outside of what is checkpointed (transformers: model.gradient_checkpointing_enable() first)"
    elif any("recompute" in node.meta for node in graph.graph.nodes):
        why = (
            "its checkpointed regions hold no attention in one operator, and attention that is written out in products "
            "is recomputed (transformers: attn_implementation sdpa)"
        )
    else:
        return
    log.warning('checkpointing_keeps: "attention" has no effect in this graph: %s', why)


def _name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "_schema", None), "name", "")


def is_attention(node: fx.Node) -> bool:
    """One operator that attends: torch's, ours, a kernel library's, or a ``torch.autograd.Function`` around one.

    Attention that is written out, as that with dropout is, is products like any other.
    """
    if _name(node) == "autosp::autograd_function":
        use = node.kwargs.get("use", node.args[-1])
        return json.loads(str(use))["kind"] == "attention"
    return _name(node) in _ATTENTION or find_kernel(node.target) is not None


def frees_at_once(examples: list[Any]) -> bool:
    """Whether the program hands freed buffers to torch's allocator rather than keep them for later ones of its own.

    Inductor keeps a freed buffer where a later one is as large, unless that raises the peak *at the length that it
    compiles with*. At a longer one it may: the wide values of a layer, compiled at 16k tokens, lay there until the next
    layer and raised the peak of long ones by a third. A GPU's allocator gives the same block again at no cost.
    """
    # Dynamo gives tensors of the example, whose sizes are numbers, and each size that varies as an input of its own.
    return any(isinstance(x, torch.SymInt) for x in examples) and any(
        isinstance(x, torch.Tensor) and x.is_cuda for x in examples
    )


@contextlib.contextmanager
def _partitioner_settings(config: AutoSPConfig, partitioner: CustomPartitionerFn | None) -> Iterator[None]:
    """Settings of AOTAutograd's partitioner; those that are at their default are left to the user's own."""
    settings: dict[str, Any] = {}
    if partitioner is not None:
        # AOTAutograd's cache asks no partitioner for its name: a program found there would be one of another choice,
        # and a rank that finds one would not take part in choosing.
        settings["enable_autograd_cache"] = False
    if config.activation_memory_budget != "auto" and config.activation_memory_budget < 1:
        # At exactly 0 the partitioner saves inputs alone, whatever is marked to be kept.
        settings["activation_memory_budget"] = max(config.activation_memory_budget, 1e-6)
    with functorch_config.patch(settings) if settings else contextlib.nullcontext():
        yield


def _inductor_settings(
    config: AutoSPConfig, partitioner: CustomPartitionerFn | None, examples: list[Any]
) -> dict[str, Any]:
    """Sums of gradients are joined, and every collective starts as soon as its inputs are there.

    Without the second, the scheduler, which orders by memory, starts a sum just before the next exchange and nothing
    lies between the two. Where stretches run in parts of the tokens, products keep their order. Copies to the host and
    back take their places last.
    """
    settings: dict[str, Any] = {} if partitioner is None else {"custom_partitioner_fn": partitioner}
    if inductor_config.cpp.simdlen is None and all(x.is_cpu for x in examples if isinstance(x, torch.Tensor)):
        # torch's caches do not say for which vectors a program was written: one for 512 bits that a machine with 256
        # finds there gives wrong numbers (tried with torch 2.13). The width that torch takes is in their keys if said.
        settings["cpp.simdlen"] = pick_vec_isa().bit_width()
    if frees_at_once(examples):
        settings["allow_buffer_reuse"] = False
    last_pass = inductor_config.post_grad_custom_post_pass
    users = inductor_config.reorder_for_compute_comm_overlap
    orders = list(inductor_config.reorder_for_compute_comm_overlap_passes) if users else []
    if config.overlap_communication:
        last_pass = settings["post_grad_custom_post_pass"] = JoinGradientSums(last_pass)
        if not users:
            orders.append("raise_comms")
    if config.activation_offloading is True:
        orders.append(place_host_copies)
    if orders:
        settings["reorder_for_compute_comm_overlap"] = True
        settings["reorder_for_compute_comm_overlap_passes"] = orders
    if config.tiles != 1:
        settings["post_grad_custom_post_pass"] = KeepProductsInOrder(last_pass)
    return settings
