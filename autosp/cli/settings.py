"""What one training run is, as plain data that is written to ``run.json`` and read back by every rank."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from autosp.errors import ConfigError

DTYPES = ("fp32", "bf16")
INNER_BACKENDS = ("inductor", "aot_eager", "eager")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmKM]?)")
_FACTORS = {"": 1, "k": 1024, "m": 1024 * 1024}

# DeepSpeed settings that change how training goes and that this loop does not carry out: said, never swallowed.
_NOT_CARRIED_OUT = ("scheduler", "fp16", "zero_optimization", "pipeline", "activation_checkpointing")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One run of ``autosp train``. Every value is resolved: no "default of the default" is left to a rank."""

    out: str
    """Run folder; on several machines it is on storage that all of them see."""
    model: str | None = None
    """Folder, ``config.json`` or ``.gguf``; ``None`` is the built-in small Llama."""
    data: tuple[str, ...] = ()
    """Files, folders and globs; empty means the Python standard library's own source."""
    config: dict[str, Any] = field(default_factory=dict)
    """The DeepSpeed-style JSON that ``autosp.initialize`` gets, sizes not yet filled in."""
    nproc: int = 2
    device: str = "cpu"
    inner_backend: str = "aot_eager"
    seq_len: int = 512
    steps: int = 100
    batch_size: int = 1
    """Sequences a step for each data-parallel group."""
    accumulation: int = 1
    lr: float = 1e-3
    warmup: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0
    dtype: str = "fp32"
    seed: int = 0
    save_every: int = 0
    """Steps between checkpoints; 0 saves at the end and when interrupted only."""
    compare: bool = True
    resume: str | None = None
    """Checkpoint folder to go on from."""
    debug: bool = False

    def write(self, path: Path) -> None:
        """Write the settings as JSON, whole or not at all."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> TrainSettings:
        """Read what `write` wrote.

        Raises:
            ConfigError: the file is missing, is no JSON, or holds a key that this version does not know.
        """
        return cls.from_dict(read_json(path), origin=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, origin: str) -> TrainSettings:
        """Build settings from a mapping; `origin` names it in errors."""
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown or "out" not in values:
            raise ConfigError(f"{origin} was not written by this version of autosp train (unknown: {unknown})")
        values = dict(values, data=tuple(values.get("data", ())))
        if "betas" in values:
            values["betas"] = tuple(values["betas"])
        return cls(**values)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from `path`, or raise a ConfigError that says where it stops being one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}: check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, an object {{...}} is needed")
    return value


def parse_size(text: str, *, option: str, unit: str = "tokens") -> int:
    """Return the number that `text` stands for: ``512``, ``4k`` (4096), ``1.5k``, ``1m`` (1048576).

    Raises:
        ConfigError: `text` is no size, is not a whole number of `unit`, or is less than 2.
    """
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _FACTORS[match[2].lower()] if match else 0.0
    if size < 2 or size != int(size):
        raise ConfigError(f"{option} got {text!r}: give a whole number of {unit} of at least 2, such as 512, 4k or 1m")
    return int(size)


def from_engine_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Take over the training settings of a DeepSpeed-style JSON.

    Args:
        config: the parsed JSON.

    Returns:
        The fields of `TrainSettings` that it sets, and the notes to print about what this loop does not carry out.

    Raises:
        ConfigError: a setting has a wrong type, or names an optimizer other than Adam or AdamW.
    """
    found: dict[str, Any] = {}
    for key, name in (
        ("train_micro_batch_size_per_gpu", "batch_size"),
        ("gradient_accumulation_steps", "accumulation"),
    ):
        if key in config and config[key] != "auto":
            found[name] = _positive_int(config[key], key)
    if "gradient_clipping" in config and config["gradient_clipping"] != "auto":
        found["clip"] = _number(config["gradient_clipping"], "gradient_clipping")
    if _section(config, "bf16").get("enabled") is True:
        found["dtype"] = "bf16"
    found.update(_optimizer(_section(config, "optimizer")))
    if _section(config, "fp16").get("enabled") is True:
        raise ConfigError('"fp16" is enabled: autosp train has fp32 and bf16; use "bf16": {"enabled": true}')
    notes = []
    ignored = [key for key in _NOT_CARRIED_OUT if _is_active(config.get(key))]
    if ignored:
        notes.append(
            f"autosp train has its own loop: the sections {', '.join(ignored)} of the JSON have no effect on it"
        )
    if "train_batch_size" in config:
        notes.append(
            '"train_batch_size" has no effect: the batch is train_micro_batch_size_per_gpu x accumulation x dp'
        )
    return found, notes


def _optimizer(section: Mapping[str, Any]) -> dict[str, Any]:
    if not section:
        return {}
    kind = section.get("type", "AdamW")
    if kind not in ("Adam", "AdamW"):
        raise ConfigError(f'"optimizer.type" is {kind!r}: autosp train has "AdamW" (and takes "Adam" for it)')
    params = _section(section, "params", "optimizer.params")
    found: dict[str, Any] = {}
    for key in ("lr", "weight_decay"):
        if key in params and params[key] != "auto":
            found[key] = _number(params[key], f"optimizer.params.{key}")
    if "betas" in params and params["betas"] != "auto":
        betas = params["betas"]
        if not isinstance(betas, list) or len(betas) != 2:
            raise ConfigError(f'"optimizer.params.betas" is {betas!r}: give two numbers, such as [0.9, 0.95]')
        found["betas"] = tuple(_number(beta, "optimizer.params.betas") for beta in betas)
    return found


def _section(config: Mapping[str, Any], key: str, shown: str | None = None) -> Mapping[str, Any]:
    value = config.get(key, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f'"{shown or key}" is {value!r}: a section {{...}} is needed')
    return value


def _is_active(section: Any) -> bool:
    if isinstance(section, Mapping):
        return bool(section) and section.get("enabled", True) is not False and section.get("stage", 1) != 0
    return bool(section)


def _positive_int(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f'"{key}" is {value!r}: a whole number of at least 1 is needed')
    return value


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ConfigError(f'"{key}" is {value!r}: a number that is not negative is needed')
    return float(value)
