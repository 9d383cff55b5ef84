"""``tp_group=None`` and ``sp_group=None`` mean no group, also where a default process group of several ranks exists."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import vocab_oracle as oracle
from pool import RankPool
from torch.distributed.tensor.debug import CommDebugMode

import autosp

ROWS, HIDDEN, VOCAB = 4, 5, 11
INDEX = torch.tensor([0, 7, -100, 10])


def over_logits(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every loss over logits, no group given."""
    top = y.detach().topk(3).indices
    teacher = oracle.log_probs(y.detach()).gather(-1, top).float()
    stats = autosp.vocab_parallel_token_stats(x, INDEX.clamp(min=0))
    return {
        "mean": autosp.vocab_parallel_cross_entropy(x, INDEX),
        "sum": autosp.vocab_parallel_cross_entropy(x, INDEX, reduction="sum", label_smoothing=0.1),
        "logprobs": autosp.vocab_parallel_logprobs(x, INDEX),
        "entropy": autosp.vocab_parallel_entropy(x),
        "lse": stats.lse,
        "KL": autosp.vocab_parallel_kl_div(x, y),
        "reverse KL": autosp.vocab_parallel_kl_div(x, y, True),
        "JSD": autosp.vocab_parallel_jsd(x, y, 0.3),
        "top-k KL": autosp.vocab_parallel_topk_kl_div(x, teacher, top),
    }


def expected(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    top = y.detach().topk(3).indices
    teacher = oracle.log_probs(y.detach()).gather(-1, top).float()
    cross_entropy = torch.nn.functional.cross_entropy
    return {
        "mean": cross_entropy(x, INDEX),
        "sum": cross_entropy(x, INDEX, reduction="sum", label_smoothing=0.1),
        "logprobs": oracle.logprobs(x, INDEX),
        "entropy": oracle.entropy(x),
        "lse": oracle.lse(x),
        "KL": oracle.kl(y, x),
        "reverse KL": oracle.kl(x, y),
        "JSD": oracle.jsd(x, y, 0.3),
        "top-k KL": oracle.topk_kl(x, teacher, top),
    }


def from_the_head(h: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every loss from hidden states and heads ``w`` and ``v``, no group given."""
    stats = autosp.vocab_parallel_linear_token_stats(h, w, INDEX.clamp(min=0))
    return {
        "mean": autosp.vocab_parallel_linear_cross_entropy(h, w, INDEX),
        "sum": autosp.vocab_parallel_linear_cross_entropy(h, w, INDEX, reduction="sum", label_smoothing=0.1),
        "logprobs": autosp.vocab_parallel_linear_logprobs(h, w, INDEX),
        "entropy": autosp.vocab_parallel_linear_entropy(h, w),
        "lse": stats.logsumexp,
        "KL": autosp.vocab_parallel_linear_kl_div(h, w, h, v),
        "reverse KL": autosp.vocab_parallel_linear_kl_div(h, w, h, v, reverse=True),
        "JSD": autosp.vocab_parallel_linear_jsd(h, w, h, v, beta=0.3),
    }


def alone_body(info, family):
    assert dist.get_world_size() == 2
    generator = torch.Generator().manual_seed(info.rank)
    h = torch.randn(ROWS, HIDDEN, generator=generator, requires_grad=True)
    w, v = (torch.randn(VOCAB, HIDDEN, generator=generator, requires_grad=True) for _ in range(2))
    with CommDebugMode() as issued:
        got = over_logits(h @ w.t(), h @ v.t()) if family == "logits" else from_the_head(h, w, v)
        gradients = {k: torch.autograd.grad(x.nansum(), (h, w), retain_graph=True) for k, x in got.items()}
    assert issued.get_total_counts() == 0, issued.get_comm_counts()
    want = expected(h.double() @ w.double().t(), h.double() @ v.double().t())
    for name, value in got.items():
        torch.testing.assert_close(
            value.double(), want[name].double(), rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        reference = torch.autograd.grad(want[name].nansum(), (h, w), retain_graph=True)
        torch.testing.assert_close(
            gradients[name], reference, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )
    return got["mean"].item()


@pytest.mark.parametrize("family", ["logits", "head"])
def test_no_group_is_not_the_world(ranks: RankPool, family: str) -> None:
    """Ranks hold different problems; each gets its own answer, and no collective is issued."""
    first, second = ranks.run(alone_body, family, timeout=60)
    assert abs(first - second) > 1e-2
