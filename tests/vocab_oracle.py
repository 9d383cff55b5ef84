"""fp64 references of the vocabulary-parallel losses on whole logits, written from the definitions in plain PyTorch."""

from __future__ import annotations

import torch


def effective(logits, temperature=1.0, softcap=None):
    z = logits.double()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double().unsqueeze(-1)
    return z / temperature


def log_probs(logits, **scaling):
    return torch.log_softmax(effective(logits, **scaling), dim=-1)


def skip(weight, value):
    """weight * value over the terms of weight > 0, without a NaN gradient from the others."""
    live = weight > 0
    return torch.where(live, weight * torch.where(live, value, torch.zeros_like(value)), torch.zeros_like(value))


def logprobs(logits, index, ignore_index=-100, **scaling):
    flat = index if index.dim() == logits.dim() else index.unsqueeze(-1)
    ignored = flat == ignore_index
    picked = log_probs(logits, **scaling).gather(-1, flat.masked_fill(ignored, 0)).masked_fill(ignored, 0.0)
    return picked.view(index.shape)


def entropy(logits, **scaling):
    logp = log_probs(logits, **scaling)
    return -skip(logp.exp(), logp).sum(-1)


def lse(logits, **scaling):
    return torch.logsumexp(effective(logits, **scaling), dim=-1)


def kl(p_logits, q_logits, **scaling):
    log_p, log_q = log_probs(p_logits, **scaling), log_probs(q_logits, **scaling)
    live = log_p > -torch.inf
    difference = torch.where(live, log_p, 0.0) - torch.where(live, log_q, 0.0)
    return skip(log_p.exp(), difference).sum(-1)


def jsd(student, teacher, beta, **scaling):
    if beta == 0:
        return kl(teacher, student, **scaling)
    if beta == 1:
        return kl(student, teacher, **scaling)
    p, q = log_probs(student, **scaling).exp(), log_probs(teacher, **scaling).exp()
    mixed = (1 - beta) * p + beta * q
    tiny = torch.finfo(torch.float64).tiny
    log_ratio = lambda t: t.clamp_min(tiny).log() - mixed.clamp_min(tiny).log()  # noqa: E731
    return ((1 - beta) * skip(p, log_ratio(p)) + beta * skip(q, log_ratio(q))).sum(-1)


def cross_entropy(logits, target, *, reduction="mean", label_smoothing=0.0, z_loss=0.0, ignore_index=-100, **scaling):
    z = effective(logits, **scaling)
    valid = target != ignore_index
    loss = torch.nn.functional.cross_entropy(
        z.reshape(-1, z.shape[-1]),
        target.reshape(-1),
        reduction="none",
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    ).view(target.shape)
    loss = loss + torch.where(valid, z_loss * torch.logsumexp(z, -1) ** 2, torch.zeros_like(loss))
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / valid.sum()


def topk_kl(student, teacher_logprobs, index, reverse=False, ignore_index=-100, **scaling):
    p = log_probs(student, **scaling).exp()
    keep = index != ignore_index
    chosen = torch.zeros(p.shape, dtype=torch.bool).scatter(-1, index.masked_fill(~keep, 0), keep)
    s_top = p.gather(-1, index.masked_fill(~keep, 0)).masked_fill(~keep, 0.0)
    t_top = teacher_logprobs.double().exp().masked_fill(~keep, 0.0)
    s = torch.cat([s_top, p.masked_fill(chosen, 0.0).sum(-1, keepdim=True)], -1)
    t = torch.cat([t_top, (1 - t_top.sum(-1, keepdim=True)).clamp_min(0)], -1)
    a, b = (s, t) if reverse else (t, s)
    live = a > 0
    ratio = torch.where(live, a, 1.0).log() - torch.where(live, b, 1.0).log()
    return skip(a, ratio).sum(-1)
