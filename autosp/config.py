"""`AutoSPConfig`: every setting of autosp, read from a DeepSpeed-style JSON.

The JSON a DeepSpeed user already has is enough: DeepSpeed's own keys say how large each axis is, and an ``"autosp"``
section of ours holds the rest::

    {"sequence_parallel_size": 4, "tensor_parallel": {"autotp_size": 2},
     "autosp": {"outputs": "full", "inner_backend": "aot_eager"}}

Sizes: ``dp * sp * tp`` is the world. ``tp`` is ``tensor_parallel.autotp_size`` (0 or absent: 1). Of ``dp`` and ``sp``
a missing one takes what the others leave; with both missing, ``sp`` takes everything that ``tp`` leaves.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autosp.errors import ConfigError
from autosp.settings_without_effect import without_effect

logger = logging.getLogger(__name__)

SECTION = "autosp"
OPTION_NAMES = (
    "attention",
    "gradient_reduction",
    "outputs",
    "unsupported",
    "inner_backend",
    "verify",
    "verify_timeout",
    "fuse_linear_cross_entropy",
    "linear_cross_entropy_memory",
    "activation_memory_budget",
    "checkpointing_keeps",
    "activation_offloading",
    "step_memory_gib",
    "overlap_communication",
    "token_tiles",
)
# A strategy of attention is a file of that folder; its name is the value of the setting.
_STRATEGY_FILES = (Path(__file__).parent / "layout" / "attention" / "strategies").glob("[a-z]*.py")
ATTENTION_STRATEGIES = ("auto", *sorted(path.stem for path in _STRATEGY_FILES))
if TYPE_CHECKING:
    AttentionStrategy = str
else:
    AttentionStrategy = Literal[ATTENTION_STRATEGIES]
COMPILE_PASSES = ("z1", "z3", "autosp")
_TENSOR_PARALLEL_FIELDS = {
    "autotp_size": "tensor_parallel_size",
    "vocab_parallel_lm_head": "vocab_parallel_lm_head",
    "vocab_parallel_ce_backend": "vocab_parallel_ce_backend",
    "vocab_parallel_embedding": "vocab_parallel_embedding",
}
_READ_KEYS = ("sequence_parallel_size", "data_parallel_size", "mesh_param", "compile", "tensor_parallel", SECTION)
# Top-level keys of DeepSpeed's JSON (deepspeed/runtime/config.py and constants.py, 0.19) that mean nothing to autosp.
# A key in neither list is most likely a misspelt one, so it is worth a warning instead of a log line.
_DEEPSPEED_KEYS = frozenset(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler fp16 bf16
    bfloat16 amp torch_autocast gradient_clipping communication_data_type seq_parallel_communication_data_type
    seq_parallel_comm_data_type prescale_gradients gradient_predivide_factor gradient_allreduce_op
    sparse_gradients zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    zero_quantized_weights steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level
    disable_allgather flops_profiler activation_checkpointing sparse_attention data_efficiency
    curriculum_learning progressive_layer_drop eigenvalue compression_training monitor_config tensorboard wandb
    comet csv_monitor comms_logger autotuning elasticity checkpoint data_types aio nebula datastates_config
    hybrid_engine pipeline graph_harvesting timers weight_quantization quantize_training dataloader_drop_last
    use_data_before_expert_parallelism expert_parallel use_node_local_storage vocabulary_size
    managed_gradient_accumulation inference
    """.split()  # noqa: SIM905 - a list of sixty lines reads worse
)


class AutoSPConfig(BaseModel):
    """The settings of autosp: frozen, keyword-only, unknown names refused.

    Raises:
        ConfigError: an unknown setting or a value that is not allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    sequence_parallel_size: int | None = Field(default=None, ge=1)
    """Ranks that share one sequence. None: what the other axes leave of the world."""

    data_parallel_size: int | None = Field(default=None, ge=1)
    """Groups of ranks that see different batches. None: what the other axes leave of the world."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share one vocabulary (`tensor_parallel.autotp_size` in the JSON)."""

    attention: AttentionStrategy = "auto"
    """How attention sees the whole sequence: "ulysses" (tokens exchanged for heads), "allgather_kv" (keys and values
    gathered), "ring" (keys and values go round), "hybrid" (heads inside, gathered outside), or "auto": the cheapest."""

    gradient_reduction: Literal["graph", "engine_mean", "engine_sum"] = "graph"
    """Who sums a parameter's gradient over the sequence group. "graph": the compiled backward, right with no engine and
    under any that averages over the world; "engine_mean": an engine that averages over the world (no traffic of ours);
    "engine_sum": an engine that sums over the sequence group and averages over data parallelism."""

    outputs: Literal["dtensor", "full", "local"] = "dtensor"
    """A sharded output comes back as a DTensor on the mesh axis "sp", gathered, or as this rank's shard."""

    unsupported: Literal["error", "gather"] = "error"
    """An operator without a rule stops compilation, or has its inputs gathered (always right, more memory)."""

    inner_backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """What compiles the program of one rank."""

    verify: Literal["inputs", "compile"] = "inputs"
    """"compile": ranks of a group compare their graphs once per compilation. "inputs": that, before each step that they
    were given the same inputs, and now and then that their weights do not drift apart."""

    verify_timeout: float = Field(default=600.0, gt=0)
    """Seconds that a rank waits in such a comparison for the others before it raises."""

    fuse_linear_cross_entropy: Literal["auto", "always", "never"] = "never"
    """Whether an LM head followed by cross entropy becomes one operator that never holds the whole logits."""

    linear_cross_entropy_memory: Literal["auto", "fast", "lean"] = "auto"
    """What such an operator may hold: "fast" an fp32 gradient of the head, "lean" half a GiB for a GEMM more, "auto"
    fast unless that gradient is more than an eighth of the device's memory."""

    activation_memory_budget: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = 1.0
    """Share of the activations that the backward may keep: 1 keeps what is faster to keep, 0 recomputes all but inputs,
    attention, collectives and fused losses; "auto" takes the largest with which the step fits at these sizes."""

    checkpointing_keeps: Literal["nothing", "attention"] = "nothing"
    """What the model's own activation checkpointing keeps of a body beside its inputs: "attention" keeps what attention
    gives (as large as the hidden states), so that the work that grows with the square of the length is done once."""

    activation_offloading: bool | Literal["auto"] = False
    """Move saved activations to the host in the forward and back in the backward, on a stream of their own (CUDA).
    "auto": where the budget "auto" finds none that fits."""

    step_memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """What "auto" may spend on activations, gradients and temporaries of a step. None: what the device has free when
    the step is compiled, less a twentieth of it and AdamW's states."""

    token_tiles: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = 1
    """Parts in which an MLP, or any stretch that widens each token alone, runs over its tokens, recomputed part by part
    in the backward: its wide values exist for one part at a time. 1: in one piece; "auto": 8 where the budget "auto"
    finds none that fits."""

    overlap_communication: bool = True
    """Let the scheduler of Inductor put off the waits of collectives until their results are needed."""

    deepcompile: bool = False
    """DeepSpeed's `compile.deepcompile`; only its engine reads it."""

    compile_passes: tuple[Literal["z1", "z3", "autosp"], ...] | None = None
    """DeepSpeed's `compile.passes`; "autosp" among them, with `deepcompile`, asks its engine for this backend."""

    vocab_parallel_lm_head: bool = False
    """Keep the LM head and its logits sharded over the vocabulary (DeepSpeed's key of the same name)."""

    vocab_parallel_ce_backend: Literal["torch", "liger", "fused_linear"] = "torch"
    """The loss of a sharded head. "torch" and "liger" (DeepSpeed's words for it): from sharded logits, by autosp's own
    operators either way; "fused_linear": from hidden states and head, so that the logits never exist."""

    vocab_parallel_embedding: bool = False
    """Shard a tied embedding together with the LM head; without it a tied head is refused."""

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @classmethod
    def from_json(cls, source: str | os.PathLike[str] | Mapping[str, Any], world_size: int) -> AutoSPConfig:
        """Read a DeepSpeed-style JSON (a path, or what such a file holds) for a world of `world_size` ranks.

        Returns a config whose three sizes are set and multiply to `world_size`. Keys of DeepSpeed that autosp does not
        use are named in one log line (level INFO), keys that nobody knows in one warning.

        Raises:
            ConfigError: the file cannot be read; an unknown key or value in our section; sizes that contradict each
                other or do not cover the world.
        """
        tree = read_json(source)
        settings = _read_options(tree)
        settings.update(_read_compile(tree))
        settings.update(_read_tensor_parallel(tree))
        settings.update(_read_sizes(tree))
        _note_ignored_keys(tree)
        return cls(**settings).for_world(world_size)

    def for_world(self, world_size: int) -> AutoSPConfig:
        """The same settings with all three sizes set so that ``dp * sp * tp == world_size``.

        Raises:
            ConfigError: no such sizes exist; the message says what was asked and what the world allows.
        """
        sizes = _fill_sizes(self.data_parallel_size, self.sequence_parallel_size, self.tensor_parallel_size, world_size)
        explicit = {name: getattr(self, name) for name in self.model_fields_set}
        names = ("data_parallel_size", "sequence_parallel_size", "tensor_parallel_size")
        config = type(self)(**{**explicit, **dict(zip(names, sizes, strict=True))})
        for sentence in without_effect(config, OPTION_NAMES):
            warnings.warn(sentence, stacklevel=3)
        return config

    def with_options(self, options: Mapping[str, Any] | None) -> AutoSPConfig:
        """The config with the ``options=`` of one ``torch.compile`` laid over it, checked like the JSON's own section.

        Raises:
            ConfigError: an unknown option or a value that is not allowed.
        """
        if not options:
            return self
        _check_option_names(options, "torch.compile(options=...)")
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **options})

    @property
    def tiles(self) -> int:
        """Parts in which stretches run; a number that is left to "auto" is 1 until that has chosen."""
        return 1 if self.token_tiles == "auto" else self.token_tiles

    @property
    def requests_autosp(self) -> bool:
        """Whether the JSON asks a DeepSpeed engine for this backend (`deepcompile` with "autosp" in `passes`)."""
        return self.deepcompile and "autosp" in (self.compile_passes or ())


def read_json(source: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    """What a JSON file holds, duplicate keys refused; a mapping as it is.

    Raises:
        ConfigError: the file cannot be read, or is no JSON object.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"a config is a path to a JSON file, a dict or an AutoSPConfig, not {type(source).__name__}")
    path = Path(source)
    try:
        tree = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"the config {str(path)!r} is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"the config {str(path)!r} holds a {type(tree).__name__}; a JSON object is expected")
    return tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate keys {sorted({name for name in names if names.count(name) > 1})}")
    return tree


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = tree.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; a JSON object with settings is expected")
    return value


def _read_options(tree: Mapping[str, Any]) -> dict[str, Any]:
    section = _section(tree, SECTION)
    _check_option_names(section, f'the "{SECTION}" section')
    return dict(section)


def _check_option_names(options: Mapping[str, Any], place: str) -> None:
    unknown = sorted(str(name) for name in options if name not in OPTION_NAMES)
    if unknown:
        hints = _did_you_mean(unknown, OPTION_NAMES)
        raise ConfigError(f"unknown {_listing(unknown)} in {place}{hints}; valid settings: {', '.join(OPTION_NAMES)}")


def _read_compile(tree: Mapping[str, Any]) -> dict[str, Any]:
    section = _section(tree, "compile")
    settings: dict[str, Any] = {}
    if "deepcompile" in section:
        settings["deepcompile"] = section["deepcompile"]
    passes = section.get("passes")
    if passes is not None:
        if not isinstance(passes, (list, tuple)) or any(name not in COMPILE_PASSES for name in passes):
            raise ConfigError(f"compile.passes is {passes!r}; a list of {_listing(COMPILE_PASSES)} is expected")
        settings["compile_passes"] = tuple(passes)
    return settings


def _read_tensor_parallel(tree: Mapping[str, Any]) -> dict[str, Any]:
    section = _section(tree, "tensor_parallel")
    settings = {field: section[key] for key, field in _TENSOR_PARALLEL_FIELDS.items() if key in section}
    if settings.get("tensor_parallel_size") == 0:  # DeepSpeed's word for "off"
        settings["tensor_parallel_size"] = 1
    return settings


def _read_sizes(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of dp and sp, each given by its own key, by `mesh_param` (DeepSpeed's ``(dp, sp)``), or by both."""
    given = {name: tree[name] for name in ("data_parallel_size", "sequence_parallel_size") if name in tree}
    mesh = tree.get("mesh_param")
    if mesh is None:
        return given
    if not isinstance(mesh, (list, tuple)) or len(mesh) != 2 or not all(type(size) is int for size in mesh):
        raise ConfigError(f"mesh_param is {mesh!r}; a list [data_parallel_size, sequence_parallel_size] is expected")
    for name, size in zip(("data_parallel_size", "sequence_parallel_size"), mesh, strict=True):
        if given.setdefault(name, size) != size:
            raise ConfigError(
                f"{name} is given twice: {given[name]} by its own key and {size} by mesh_param {list(mesh)}; "
                "make them equal or remove one"
            )
    return given


def _note_ignored_keys(tree: Mapping[str, Any]) -> None:
    ignored = sorted(key for key in tree if key in _DEEPSPEED_KEYS)
    if ignored:
        logger.info("DeepSpeed settings that autosp does not use: %s", ", ".join(ignored))
    unknown = sorted(str(key) for key in tree if key not in _DEEPSPEED_KEYS and key not in _READ_KEYS)
    if not unknown:
        return
    hint = _did_you_mean(unknown, _READ_KEYS) or f'; settings of autosp belong in the section "{SECTION}"'
    warnings.warn(f"unknown top-level settings are ignored: {', '.join(unknown)}{hint}", stacklevel=4)


def _did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    """``; a (did you mean b?)`` for the names that are near to one that is known; empty for none."""
    names = list(known)
    return "".join(
        f"; {key} (did you mean {near[0]}?)" for key in unknown if (near := get_close_matches(key, names, n=1))
    )


def _fill_sizes(dp: int | None, sp: int | None, tp: int, world_size: int) -> tuple[int, int, int]:
    asked = f"data_parallel_size {dp or 'unset'}, sequence_parallel_size {sp or 'unset'}, autotp_size {tp}"
    fixed = (dp or 1) * (sp or 1) * tp
    whole = dp is not None and sp is not None
    if world_size % fixed or (whole and fixed != world_size):
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ConfigError(
            f"{asked} do not cover a world of {world_size}: dp x sp x tp must be {world_size}, so each must be one of "
            f"{divisors}; leave one of dp and sp out to have it fill the world, or start {fixed} processes "
            f"(torchrun --nproc-per-node={fixed})"
        )
    rest = world_size // fixed
    if sp is None:
        return dp or 1, rest, tp
    return dp or rest, sp, tp


def _explain(error: ValidationError) -> str:
    """One line for each bad setting: what was got and what is allowed."""
    lines: dict[str, str] = {}
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else "config"
        message = f"{item['msg'][0].lower()}{item['msg'][1:]}"
        if item["type"] == "extra_forbidden":
            lines[name] = f"unknown setting {name!r}; valid settings: {', '.join(AutoSPConfig.model_fields)}"
        elif choices := _choices(name):
            lines[name] = f"{name} is {item['input']!r}; allowed: {_listing(choices)}"
        elif name in lines:  # a number or a word: neither was given
            lines[name] += message.replace("input should be", ", or")
        else:
            lines[name] = f"{name} is {item['input']!r}: {message}"
    return "\n".join(lines.values())


def _choices(name: str) -> tuple[str, ...]:
    """The values of a setting that is one of a few words; empty for any other setting."""
    annotation = AutoSPConfig.model_fields[name].annotation if name in AutoSPConfig.model_fields else None
    arguments = getattr(annotation, "__args__", ())
    return tuple(value for value in arguments if isinstance(value, str))


def _listing(values: list[str] | tuple[str, ...]) -> str:
    return ", ".join(repr(value) for value in values)
