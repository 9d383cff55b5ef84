"""What users of the losses rely on besides numbers: names, argument order, defaults, and collectives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autosp
from autosp.custom_ops.vocab_parallel import jsd_op, kl_op, row_stats_op

BOUNDS = {"vocab_start_index": None, "vocab_end_index": None}
# Positional arguments in order, and defaults, as users know them; what a function has more comes behind these.
SIGNATURES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "vocab_parallel_cross_entropy": (
        ["logits", "target"],
        {"tp_group": None, "sp_group": None, **BOUNDS, "ignore_index": -100, "reduction": "mean"}
        | {"label_smoothing": 0.0, "z_loss": 0.0},
    ),
    "vocab_parallel_logprobs": (
        ["logits", "index"],
        {"tp_group": None, **BOUNDS, "global_vocab_size": None, "ignore_index": -100},
    ),
    "vocab_parallel_entropy": (["logits"], {"tp_group": None}),
    "vocab_parallel_kl_div": (["student", "teacher"], {"reverse": False, "tp_group": None}),
    "vocab_parallel_jsd": (["student", "teacher"], {"beta": 0.5, "tp_group": None}),
    "vocab_parallel_token_stats": (["logits", "index"], {"tp_group": None}),
    "vocab_parallel_linear_cross_entropy": (
        ["hidden", "weight", "target"],
        {"bias": None, "tp_group": None, "sp_group": None, **BOUNDS, "ignore_index": -100, "reduction": "mean"}
        | {"chunk_size": None, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "temperature": 1.0},
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_argument_names_and_defaults(name: str) -> None:
    required, defaults = SIGNATURES[name]
    parameters = inspect.signature(getattr(autosp, name)).parameters
    given = {p.name: p.default for p in parameters.values()}
    assert list(given)[: len(required) + len(defaults)] == [*required, *defaults]
    assert all(given[key] is inspect.Parameter.empty for key in required)
    assert {key: given[key] for key in defaults} == defaults
    assert all(value is not inspect.Parameter.empty for key, value in given.items() if key not in required)


def test_every_loss_is_a_public_name() -> None:
    from autosp.custom_ops import linear_loss, vocab_parallel

    losses = {name for package in (linear_loss, vocab_parallel) for name in package.__all__ if "Stats" in name}
    losses |= {n for package in (linear_loss, vocab_parallel) for n in package.__all__ if n.startswith("vocab_")}
    assert len(losses) == 15 and losses <= set(autosp.__all__)


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
# One gather of the packed statistics in the forward, one more for the JSD, none in the backward.
GATHERS: dict[str, tuple[Loss, int]] = {
    "logprobs": (lambda x, y, t, g: autosp.vocab_parallel_logprobs(x, t, g), 1),
    "entropy": (lambda x, y, t, g: autosp.vocab_parallel_entropy(x, g), 1),
    "token stats": (lambda x, y, t, g: autosp.vocab_parallel_token_stats(x, t, g).entropy, 1),
    "cross entropy": (lambda x, y, t, g: autosp.vocab_parallel_cross_entropy(x, t, g), 1),
    "KL": (lambda x, y, t, g: autosp.vocab_parallel_kl_div(x, y, False, g), 1),
    "reverse KL": (lambda x, y, t, g: autosp.vocab_parallel_kl_div(x, y, True, g), 1),
    "JSD": (lambda x, y, t, g: autosp.vocab_parallel_jsd(x, y, 0.5, g), 2),
}


@pytest.mark.parametrize("name", GATHERS)
def test_collectives_of_a_sharded_vocabulary(
    name: str, fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ranks(2)
    gathered: list[str] = []

    def counting(packed: torch.Tensor, group: str) -> torch.Tensor:
        gathered.append(group)
        return torch.stack([packed, packed])

    for module in (row_stats_op, kl_op, jsd_op):
        monkeypatch.setattr(module, "gather_packed", counting)
    x, y = (torch.randn(3, 6).requires_grad_() for _ in range(2))
    function, expected = GATHERS[name]
    loss = function(x, y, torch.tensor([0, 5, 2]), dist.group.WORLD)
    assert len(gathered) == expected
    loss.sum().backward()
    assert len(gathered) == expected and x.grad is not None
