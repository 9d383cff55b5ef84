"""What the fused losses ask of a device: mixed GEMMs without guessing, and collectives that run beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autosp.custom_ops.linear_loss import (
    gemm,
    groups,
    plan,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_linear_kl_div,
    vocab_parallel_linear_logprobs,
)

N, H, V = 8, 6, 20


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(rows, H, generator=generator).bfloat16().requires_grad_() for rows in (N, V))
    return h, w, torch.randint(0, V, (N,), generator=generator)


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "form": lambda h, w, t: vocab_parallel_linear_cross_entropy(h, w, t, chunk_size=4),
    "keep": lambda h, w, t: vocab_parallel_linear_cross_entropy(h, w, t),
    "lean": lambda h, w, t: vocab_parallel_linear_cross_entropy(h, w, t, memory="lean"),
    "main_grad": lambda h, w, t: vocab_parallel_linear_cross_entropy(
        h, w, t, main_grad=torch.zeros(V, H), main_grad_upstream=1.0
    ),
    "logprobs": lambda h, w, t: vocab_parallel_linear_logprobs(h, w, t).sum(),
    "KL": lambda h, w, t: vocab_parallel_linear_kl_div(h, w, h.detach() * 2, w.detach()).sum(),
}


class Products:
    """Stands for a device with mixed GEMMs: computes them on the CPU, and runs out of memory at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
        self.count, self.fails_at = 0, fails_at
        monkeypatch.setattr(gemm, "has_mixed_gemm", lambda device, dtype: dtype in (torch.bfloat16, torch.float16))
        monkeypatch.setattr(torch, "mm", self.mm)
        monkeypatch.setattr(torch, "addmm", self.addmm)
        monkeypatch.setattr(gemm, "_matmul_by_slabs", self.widened)

    def _one(self) -> None:
        self.count += 1
        if self.count - 1 == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def mm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, out_dtype: Any = None) -> torch.Tensor:
        self._one()
        return out.copy_(a.float() @ b.float())

    def addmm(
        self, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, out_dtype: Any = None
    ) -> torch.Tensor:
        self._one()
        return out.copy_(c.float() + a.float() @ b.float())

    def widened(self, *_: Any) -> None:
        raise AssertionError("out of memory was taken for a GEMM that the device does not have")


@pytest.mark.parametrize("name", LOSSES)
def test_out_of_memory_is_never_taken_for_unsupported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever product of a step fails, the caller sees that very error."""
    if name in ("form", "keep"):
        monkeypatch.setattr(plan, "choose_way", lambda *_: name)
    whole = Products(monkeypatch, fails_at=-1)
    LOSSES[name](*problem()).backward()
    assert whole.count >= 3
    for place in range(whole.count):
        Products(monkeypatch, place)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            LOSSES[name](*problem()).backward()


def test_the_dispatcher_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without the kernels has none of them; the CPU is not asked, its GEMMs are widened."""
    monkeypatch.setattr(torch.version, "hip", None)
    asked: list[tuple[str, str]] = []
    for answer in (True, False):
        monkeypatch.setattr(
            torch._C,
            "_dispatch_has_kernel_for_dispatch_key",
            lambda name, key, answer=answer: asked.append((name, key)) or answer,
        )
        assert gemm.has_mixed_gemm(torch.device("cuda"), torch.bfloat16) == answer
    assert asked == [("aten::mm.dtype_out", "CUDA"), ("aten::addmm.dtype_out", "CUDA"), ("aten::mm.dtype_out", "CUDA")]
    assert not gemm.has_mixed_gemm(torch.device("cpu"), torch.bfloat16)
    assert not gemm.has_mixed_gemm(torch.device("cuda"), torch.float32)


def order_of(way: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """GEMMs, and starts and waits of the hidden gradient's all-reduce, in the order in which they are issued."""
    events: list[str] = []
    started: list[torch.Tensor] = []
    start, finish = groups.start_all_reduce, groups.finish
    logits_into, matmul_into = gemm.logits_into, gemm.matmul_into

    def starting(tensor: torch.Tensor, op: str, name: str) -> torch.Tensor:
        if tensor.dim() == 2 and tensor.shape[1] == H:
            events.append("start")
            started.append(tensor)
        return start(tensor, op, name)

    def finishing(tensor: torch.Tensor) -> torch.Tensor:
        if any(tensor is other for other in started):
            events.append("wait")
        return finish(tensor)

    def product(out: torch.Tensor, *rest: Any, **options: Any) -> None:
        events.append("weight gradient" if tuple(out.shape) == (V, H) else "hidden gradient")
        matmul_into(out, *rest, **options)

    monkeypatch.setattr(groups, "start_all_reduce", starting)
    monkeypatch.setattr(groups, "finish", finishing)
    monkeypatch.setattr(gemm, "logits_into", lambda *a: events.append("logits") or logits_into(*a))
    monkeypatch.setattr(gemm, "matmul_into", product)
    monkeypatch.setattr(plan, "choose_way", lambda *_: way)
    h, w, t = problem()
    h, w = (x.detach().float().requires_grad_() for x in (h, w))
    vocab_parallel_linear_cross_entropy(h, w, t, tp_group=dist.group.WORLD, chunk_size=4).backward()
    return events


def test_the_hidden_gradient_is_reduced_beside_the_next_chunks_gemms(
    fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ranks(2)
    chunk = ["logits", "hidden gradient", "start", "weight gradient"]
    second = ["logits", "wait", "hidden gradient", "start", "weight gradient", "wait"]
    assert order_of("form", monkeypatch) == chunk + second


def test_the_hidden_gradient_is_reduced_beside_the_last_weight_gradient(
    fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ranks(2)
    order = order_of("keep", monkeypatch)
    assert order[-3:] == ["start", "weight gradient", "wait"] and order.count("start") == 1
