"""The model and its tokenizer: built in, a folder, a ``config.json``, or a GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from autosp.cli.corpus import ByteTokenizer, PretrainedTokenizer, Tokenizer
from autosp.errors import InputError

BYTES = 256
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def builtin_config() -> Any:
    """Return the configuration of the small Llama: bytes and three marks, 4 layers, 8 query and 4 KV heads."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=BYTES + 8,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1 << 20,
        eos_token_id=BYTES,
        bos_token_id=BYTES + 1,
        pad_token_id=BYTES + 2,
        tie_word_embeddings=True,
    )


def check_model(spec: str | None) -> None:
    """Raise an InputError where `spec` cannot be a model, before any process is started."""
    if spec is None:
        return
    path = Path(spec)
    if not path.exists():
        raise InputError(f"model {spec}: there is no such path; give a folder, a config.json or a .gguf file")
    if path.is_dir():
        if (path / "run.json").exists():
            raise InputError(f"model {spec} is a run folder: give one of its checkpoint-N folders, or use --resume")
        if not (path / "config.json").exists():
            raise InputError(f"model {spec}: the folder has no config.json")
        if not any(next(path.glob(pattern), None) for pattern in _WEIGHT_PATTERNS):
            raise InputError(
                f"model {spec}: the folder has no weights; to start from random ones, give its config.json"
            )
    elif path.suffix == ".gguf":
        if importlib.util.find_spec("gguf") is None:
            raise InputError(f"model {spec}: reading GGUF needs the package gguf; run pip install gguf")
    elif path.suffix != ".json":
        raise InputError(f"model {spec}: give a folder, a config.json or a .gguf file")


def load_model(spec: str | None) -> Any:
    """Load or make the model, in fp32, in training mode, on the CPU.

    Args:
        spec: as in `check_model`.

    Raises:
        InputError: transformers cannot read it; the reason is in the message.
    """
    from transformers import AutoModelForCausalLM

    if spec is None:
        return AutoModelForCausalLM.from_config(builtin_config()).train()
    model = _read_model(spec)
    # Some classes (GPT-2's) leave the loss to a default and log so at each call, which would break the graph between
    # logits and loss; said once here, the same function is simply set.
    model.loss_function = model.loss_function
    return model.train()


def _read_model(spec: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(spec)
    try:
        if path.is_dir():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        elif path.suffix == ".gguf":
            model = _plain(AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32))
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"model {spec}: transformers cannot read it: {' '.join(str(error).split())}") from error
    return model


def _plain(loaded: Any) -> Any:
    """Return a model of the same weights without the mark of the file's quantization.

    The loader has turned the weights into fp32, yet transformers refuses to save a model that says it was quantized.
    """
    from transformers import AutoModelForCausalLM

    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model


def load_tokenizer(spec: str | None, model_config: Any) -> Tokenizer:
    """Load the tokenizer that goes with a model; bytes where it has none and its vocabulary holds them.

    Raises:
        InputError: there is no tokenizer and the vocabulary is smaller than 256, or it makes ids beyond the vocabulary.
    """
    vocab = model_config.get_text_config().vocab_size
    path = Path(spec) if spec is not None else None
    tokenizer = _pretrained(path) if path is not None else None
    if tokenizer is not None:
        if len(tokenizer) > vocab:
            raise InputError(
                f"model {spec}: its tokenizer has {len(tokenizer)} tokens, the model's vocabulary is {vocab}"
            )
        return PretrainedTokenizer(tokenizer=tokenizer, vocab_size=vocab, name=type(tokenizer).__name__)
    if vocab < BYTES:
        raise InputError(f"model {spec}: it has no tokenizer, and its vocabulary of {vocab} cannot hold the 256 bytes")
    end = model_config.get_text_config().eos_token_id
    return ByteTokenizer(vocab_size=vocab, end_id=end if isinstance(end, int) and BYTES <= end < vocab else None)


def _pretrained(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        if path.suffix == ".gguf":
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        folder = path if path.is_dir() else path.parent
        if any((folder / name).exists() for name in _TOKENIZER_FILES):
            return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"model {path}: its tokenizer cannot be read: {' '.join(str(error).split())}") from error
    return None


def check_length(model_config: Any, seq_len: int) -> None:
    """Raise an InputError where the model has a table of positions shorter than `seq_len`."""
    text = model_config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    # rotary positions are computed, not looked up, so that a longer sequence is right if untrained
    rotary = any(getattr(text, name, None) is not None for name in ("rope_parameters", "rope_theta", "rope_scaling"))
    if longest is not None and seq_len > longest and not rotary:
        raise InputError(
            f"--seq-len {seq_len}: this model has a table of {longest} positions; choose at most {longest}"
        )
