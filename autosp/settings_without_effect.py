"""Which settings of a configuration do nothing beside the others: each is worth a warning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import AutoSPConfig

# A rank without a sequence group has masks, an LM head and activations all the same, but nothing of these.
_OF_A_GROUP = "attention gradient_reduction outputs unsupported verify verify_timeout overlap_communication token_tiles"
# Carried out by AOTAutograd's partitioner.
_PARTITIONER = ("activation_memory_budget", "checkpointing_keeps", "activation_offloading", "token_tiles")


def without_effect(config: AutoSPConfig, options: Sequence[str]) -> list[str]:
    """One sentence for each setting that was given and does nothing.

    Args:
        config: with all three sizes set.
        options: names of the settings of the JSON's own section.
    """
    given = config.model_fields_set
    found = []
    if config.sequence_parallel_size == 1:
        idle = set(_OF_A_GROUP.split())
        if config.vocab_parallel_lm_head and config.tensor_parallel_size > 1:
            idle -= {"outputs", "unsupported", "verify", "verify_timeout", "overlap_communication"}
        names = [name for name in options if name in given and name in idle]
        if names:
            found.append(f"{', '.join(names)}: no effect, since sequence_parallel_size is 1")
    open_settings = {"step_memory_gib": None, "token_tiles": "auto", "activation_offloading": "auto"}
    names = [name for name, value in open_settings.items() if name in given and value in (None, getattr(config, name))]
    if names and config.activation_memory_budget != "auto":
        found.append(f'{", ".join(names)}: no effect unless activation_memory_budget is "auto"')
    default = {name: type(config).model_fields[name].default for name in _PARTITIONER}
    names = [name for name in _PARTITIONER if getattr(config, name) != default[name]]
    if names and config.inner_backend == "eager":
        found.append(
            f'{", ".join(names)}: no less memory with inner_backend "eager", which saves all that autograd does'
        )
    fuses = config.fuse_linear_cross_entropy != "never" or config.vocab_parallel_ce_backend == "fused_linear"
    if "linear_cross_entropy_memory" in given and not fuses:
        found.append('linear_cross_entropy_memory has no effect: fuse_linear_cross_entropy is "never"')
    if config.vocab_parallel_lm_head and config.tensor_parallel_size == 1:
        found.append("vocab_parallel_lm_head has no effect: tensor_parallel.autotp_size is 1; the head stays as it is")
    if not config.vocab_parallel_lm_head:
        names = [name for name in ("vocab_parallel_ce_backend", "vocab_parallel_embedding") if name in given]
        if names:
            found.append(f"{', '.join(names)}: no effect without tensor_parallel.vocab_parallel_lm_head")
    if "autosp" in (config.compile_passes or ()) and not config.deepcompile:
        found.append(
            'compile.passes has no effect in a DeepSpeed engine: compile.deepcompile is off (backend="autosp" of '
            "torch.compile needs neither)"
        )
    return found
