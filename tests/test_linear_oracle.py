"""The dense fp64 reference of the fused losses, checked itself against PyTorch's own losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, cap=None, temperature=1.0) -> Tensor:
    z = F.linear(hidden, weight, bias)
    if cap:
        z = cap * torch.tanh(z / cap)
    return z / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)


def reduced(losses: Tensor, valid: Tensor, reduction: str) -> Tensor:
    losses = torch.where(valid, losses, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / valid.sum()


def dense_loss(
    hidden,
    weight,
    target,
    bias=None,
    reduction="mean",
    smoothing=0.0,
    z_loss=0.0,
    cap=None,
    temperature=1.0,
    ignore=-100,
) -> Tensor:
    z = logits_of(hidden, weight, bias, cap, temperature)
    logprob = z.log_softmax(-1)
    valid = target != ignore
    picked = logprob.gather(-1, torch.where(valid, target, 0)[..., None])[..., 0]
    losses = -(1 - smoothing) * picked - smoothing * logprob.mean(-1) + z_loss * z.logsumexp(-1) ** 2
    return reduced(losses, valid, reduction)


def dense_divergence(student: Tensor, teacher: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """``kind`` is forward, reverse or jsd, of two ``[..., V]`` logits."""
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    if kind == "forward":
        return (t.exp() * (t - s)).sum(-1)
    if kind == "reverse":
        return (s.exp() * (s - t)).sum(-1)
    m = (beta * t.exp() + (1 - beta) * s.exp()).log()
    return beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)


def leaves(*tensors: Tensor | None, dtype=None) -> list[Tensor | None]:
    """Detached copies that require gradients."""
    return [None if t is None else t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in tensors]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest error over the largest expected magnitude; NaN anywhere gives NaN."""
    scale = expected.detach().abs().max().clamp(min=1e-30) if expected.numel() else torch.ones(())
    return float((got.detach().double() - expected.detach().double()).abs().max() / scale) if expected.numel() else 0.0


def gradients(value: Tensor, upstream: Tensor, inputs) -> list[Tensor]:
    return list(torch.autograd.grad(value, [x for x in inputs if x is not None], upstream))


def test_oracle_agrees_with_torch():
    torch.manual_seed(0)
    h, w, b = torch.randn(5, 4).double(), torch.randn(7, 4).double(), torch.randn(7).double()
    t = torch.tensor([0, 6, -100, 3, 2])
    for reduction in ("none", "sum", "mean"):
        expected = F.cross_entropy(F.linear(h, w, b), t, reduction=reduction, label_smoothing=0.1)
        torch.testing.assert_close(dense_loss(h, w, t, b, reduction, smoothing=0.1), expected)
    s, u = torch.randn(3, 7).double(), torch.randn(3, 7).double()
    expected = F.kl_div(s.log_softmax(-1), u.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(dense_divergence(s, u, "forward"), expected)
    torch.testing.assert_close(dense_divergence(s, u, "reverse"), dense_divergence(u, s, "forward"))
