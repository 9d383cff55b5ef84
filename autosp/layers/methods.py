"""Methods of a transformers model that know nothing of a sharded head: right, or refused with what to do."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import InputError


def install(model: nn.Module) -> None:
    """Put `SaveWhole` and `Refused` in front of the methods of ``model`` that they are for, where it has them."""
    if callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained = SaveWhole(model)  # type: ignore[assignment]
    if callable(getattr(model, "resize_token_embeddings", None)):
        model.resize_token_embeddings = Refused(  # type: ignore[assignment]
            "resize_token_embeddings would cut each rank's rows, since the LM head is sharded over the vocabulary; "
            "resize the model before autosp.initialize(config, model=model)"
        )


class SaveWhole:
    """``save_pretrained`` of a model with sharded rows: with the state dict of the dense model only.

    One rank alone cannot gather it, and those who call ``save_pretrained`` often do so on one rank.
    """

    def __init__(self, model: nn.Module) -> None:
        # A copy of the model has one of its own: both are copied together.
        self.model = model

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        state = kwargs.get("state_dict", args[1] if len(args) > 1 else None)
        if state is None or any(isinstance(value, DTensor) for value in state.values()):
            raise InputError(
                "save_pretrained of a model whose LM head is sharded over the vocabulary needs the whole state dict: "
                "call state = autosp.dense_state_dict(model) on every rank, then "
                "model.save_pretrained(path, state_dict=state) on one"
            )
        kind: Any = type(self.model)
        return kind.save_pretrained(self.model, save_directory, *args, **kwargs)


class Refused:
    """A method that would be wrong.

    Args:
        message: what it would do, and what to do instead.
    """

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise InputError(self.message)
