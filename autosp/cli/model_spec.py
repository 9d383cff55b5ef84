"""The model that a command looks at: built in, a folder, a ``config.json``, or a function of the user's.

``package.module:factory`` names a function without arguments that returns a model, or a model and a function from a
length to the keyword arguments of its forward (labels among them)::

    def small():
        model = MyModel(layers=2)
        return model, lambda length: {"input_ids": torch.randint(1, 100, (1, length)), ...}
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosp.cli.models import builtin_config, check_model
from autosp.errors import InputError

MODEL_HELP = "Folder, config.json (random weights) or package.module:factory. Default: the built-in small Llama."


@dataclass(frozen=True)
class Example:
    """A model in training mode and what to feed it: ``batch(length)`` gives the keyword arguments of its forward."""

    model: Any
    batch: Callable[[int], Mapping[str, Any]]


def is_factory(spec: str | None) -> bool:
    """Whether `spec` has the form ``package.module:factory`` and is no path."""
    if spec is None or Path(spec).exists() or spec.endswith((".json", ".gguf")):
        return False
    module, colon, name = spec.partition(":")
    return bool(colon and module and name)


def check_spec(spec: str | None, *, weights: bool) -> None:
    """Raise an InputError where `spec` cannot be a model, before any process is started."""
    if is_factory(spec):
        _factory(str(spec))
    elif spec is not None and not weights and (Path(spec) / "config.json").exists():
        return
    elif spec is not None and not Path(spec).exists():
        raise InputError(f"MODEL {spec}: there is no such path; give a folder, a config.json or package.module:factory")
    else:
        check_model(spec)


def load_example(
    spec: str | None, *, layers: int | None = None, weights: bool = True, rows: int = 1, seed: int = 0
) -> Example:
    """Make the model, and batches of random tokens for it.

    Args:
        spec: as in the module's docstring.
        layers: builds a transformers model with so many layers instead of those of its configuration.
        weights: read the weights of a folder; without, they are random (or fake, under fake tensors).
        rows: sequences in a batch.
        seed: of weights and tokens.

    Raises:
        InputError: the model cannot be made; the message says why.
    """
    import torch

    torch.manual_seed(seed)
    if is_factory(spec):
        if layers is not None:
            raise InputError("--layers is for transformers models; a factory makes the model that it makes")
        return _from_factory(str(spec), rows)
    model = _transformers_model(spec, layers, weights)
    # Some classes (GPT-2's) log at each call that they took a default loss, which would break the graph
    model.loss_function = model.loss_function
    return Example(model.train(), _token_batches(model, rows))


def _factory(spec: str) -> Callable[[], Any]:
    module, _, name = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise InputError(f"MODEL {spec}: {module} cannot be imported from {os.getcwd()}: {error}") from error
    except SyntaxError as error:
        raise InputError(f"MODEL {spec}: {module} is no valid Python: {error}") from error
    except AttributeError:
        raise InputError(f"MODEL {spec}: {module} has no {name!r}") from None
    if not callable(found):
        raise InputError(f"MODEL {spec}: {name} is a {type(found).__name__}; a function without arguments is needed")
    return found


def _from_factory(spec: str, rows: int) -> Example:
    import torch

    factory = _factory(spec)
    try:
        made = factory()
    except Exception as error:
        raise InputError(
            f"MODEL {spec}: the function failed with {type(error).__name__}: {error}; --debug shows where"
        ) from error
    if isinstance(made, torch.nn.Module):
        return Example(made, _token_batches(made, rows))
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module) and callable(made[1]):
        return Example(made[0], _checked_batches(spec, made[1]))
    raise InputError(
        f"MODEL {spec}: it returned a {type(made).__name__}; a model, or (model, function from a length to the keyword "
        "arguments of its forward) is needed"
    )


def _checked_batches(spec: str, make: Callable[[int], Any]) -> Callable[[int], Mapping[str, Any]]:
    """``make``, with an InputError where it fails or gives no mapping."""

    def batch(length: int) -> Mapping[str, Any]:
        try:
            made = make(length)
        except Exception as error:
            raise InputError(
                f"MODEL {spec}: its function of batches failed at {length} tokens with {type(error).__name__}: "
                f"{error}; --debug shows where"
            ) from error
        if not isinstance(made, Mapping):
            raise InputError(
                f"MODEL {spec}: its function of batches returned a {type(made).__name__}; a mapping from the arguments "
                "of the model's forward to their values is needed"
            )
        return made

    return batch


def read_config(spec: str | None) -> Any:
    """The transformers configuration of a folder or a ``config.json``; of the built-in model where `spec` is None.

    Raises:
        InputError: transformers cannot read it; the reason is in the message.
    """
    import transformers

    try:
        return builtin_config() if spec is None else transformers.AutoConfig.from_pretrained(Path(spec))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"MODEL {spec}: transformers cannot read it: {' '.join(str(error).split())}") from error


def _transformers_model(spec: str | None, layers: int | None, weights: bool) -> Any:
    import transformers

    path = Path(spec) if spec is not None else None
    config = read_config(spec)
    try:
        if layers is not None:
            text = config.get_text_config()
            text.num_hidden_layers = layers
            # some classes (Mamba's) compute the kinds from the number of layers, and let nobody set them
            if "layer_types" in vars(text) and text.layer_types:
                text.layer_types = text.layer_types[:layers]
        names = getattr(config, "architectures", None) or [None]
        cls = getattr(transformers, str(names[0]), None)
        if weights and path is not None and path.is_dir():
            return (cls or transformers.AutoModelForCausalLM).from_pretrained(path, config=config)
        return cls(config) if cls is not None else transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"MODEL {spec}: transformers cannot read it: {' '.join(str(error).split())}") from error


def _token_batches(model: Any, rows: int) -> Callable[[int], dict[str, Any]]:
    import torch

    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise InputError(
            "the model has no transformers configuration that tells its vocabulary: let the factory return (model, "
            "function from a length to the keyword arguments of its forward)"
        )
    vocab = config.get_text_config().vocab_size

    def batch(length: int) -> dict[str, Any]:
        ids = torch.randint(min(3, vocab - 1), vocab, (rows, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return batch
