"""Which tokens a step sees: a function of the seed and of the number of samples already seen, of nothing else."""

from __future__ import annotations

import numpy as np
import torch

from autosp.errors import InputError


class Batches:
    """Windows of `seq_len` tokens in a new random order each epoch.

    Being a pure function of (seed, position), the order is the same on every rank and after a resume, whatever the
    number of processes.

    Args:
        tokens: ids, one dimension.
        seq_len: tokens a window.
        seed: of the order.

    Raises:
        InputError: there are fewer tokens than one window needs.
    """

    def __init__(self, tokens: np.ndarray, *, seq_len: int, seed: int) -> None:
        if len(tokens) < seq_len:
            raise InputError(
                f"the data has {len(tokens):,} tokens, one sequence takes {seq_len:,}: give more, or less --seq-len"
            )
        self.tokens = tokens
        self.seq_len = seq_len
        self.seed = seed
        self.windows = len(tokens) // seq_len
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def at(self, position: int, count: int) -> torch.Tensor:
        """Return samples `position` to ``position + count - 1`` as int64 ids of shape (count, seq_len)."""
        rows = [self._window(position + offset) for offset in range(count)]
        return torch.from_numpy(np.stack(rows))

    def _window(self, sample: int) -> np.ndarray:
        epoch, index = divmod(sample, self.windows)
        if epoch != self._epoch:
            self._order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.windows)
            self._epoch = epoch
        start = int(self._order[index]) * self.seq_len
        return np.asarray(self.tokens[start : start + self.seq_len], dtype=np.int64)
