"""A copy of a model whose LM head is sharded over the vocabulary, beside the whole model that it is compared with."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping

import torch

from autosp import mesh
from autosp.agreement import agree
from autosp.errors import InputError, RankMismatchError
from autosp.layers.sharded import VocabShardedModule, vocab_sharded_modules, vocab_sharded_parameters


class ShardedCopy:
    """What ``autosp.initialize(config, model=model)`` would make of `model`, which itself stays whole.

    Collective over the ranks that share sequences and vocabulary.

    Args:
        state: of a mesh with a vocabulary axis.
        model: plain and whole.

    Raises:
        InputError: the model cannot be copied, or its head cannot be sharded; on every rank.
    """

    def __init__(self, state: mesh.AutoSPState, model: torch.nn.Module) -> None:
        try:
            self.module = copy.deepcopy(model)
        except Exception as error:
            # The others must not wait for a rank that refuses what they accept; this rank's own error tells more.
            with contextlib.suppress(RankMismatchError):
                agree(state, "refused", b"")
            raise InputError(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and a check over a "
                "vocabulary-sharded head compares the whole model with a copy that is sharded; leave out "
                "tensor_parallel.vocab_parallel_lm_head to check the sequence-parallel part"
            ) from error
        mesh.shard_head(state, self.module)
        self._sharded: Mapping[str, VocabShardedModule] = vocab_sharded_parameters(self.module)

    def take(self, tensors: Mapping[str, torch.Tensor], like: torch.nn.Module) -> None:
        """Take the whole model's weights by name, buffers as ``buffer <name>``, and the training mode of `like`."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(self.rows(name, tensors[name]))
            for name, buffer in self.module.named_buffers():
                buffer.copy_(tensors[f"buffer {name}"])
        self.module.train(like.training)
        modes = {name: module.training for name, module in like.named_modules()}
        for name, module in self.module.named_modules():
            module.training = modes.get(name, module.training)

    def rows(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a parameter's whole tensor, its values or gradient; all of them where it holds all."""
        module = self._sharded.get(name)
        return whole if module is None else module.rows_of(whole, name)


def check_whole(model: torch.nn.Module) -> None:
    """Refuse a model whose head is sharded already: there is nothing whole to compare it with.

    Raises:
        InputError: it has vocabulary-parallel layers.
    """
    if sharded := list(vocab_sharded_modules(model)):
        raise InputError(
            f"{', '.join(sharded)} of the model hold rows of the vocabulary already, so there is no whole model to "
            "compare with: call autosp.check between autosp.initialize(config), without model=, and "
            "autosp.shard_lm_head(model, state.mesh['tp']); it shards a copy by itself"
        )
