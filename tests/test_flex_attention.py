"""``flex_attention`` with score and mask functions: captured as a program, exact on a group and in its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from pool import RankPool
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

LENGTH = 140  # two blocks of a block mask, the second one short


class Flex(nn.Module):
    """One layer of ``flex_attention``; what it is given besides tokens is an input or made in the model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.toy = toys.build()
        self.kind = kind
        torch.manual_seed(4)
        self.slopes = nn.Parameter(torch.rand(4))

    def functions(self, document: torch.Tensor) -> tuple[Callable[..., Any] | None, Callable[..., Any]]:
        slopes = self.slopes

        def alibi(score, b, h, q, k):
            return score - slopes[h] * (q - k).abs()

        def soft_cap(score, b, h, q, k):
            return torch.tanh(score / 2.0) * 2.0

        def same_document(b, h, q, k):
            return (document[b, q] == document[b, k]) & (q >= k)

        def causal(b, h, q, k):
            return q >= k

        return {
            "causal": (None, causal),
            "document": (None, same_document),
            "alibi": (alibi, causal),
            "soft_cap": (soft_cap, same_document),
        }[self.kind]

    def forward(self, input_ids: torch.Tensor, document: torch.Tensor, block_mask: BlockMask | None = None):
        toy, attention = self.toy, self.toy.attention
        rows, length = input_ids.shape
        x = toy.embed(input_ids)
        q = attention.q(x).view(rows, length, 4, 4).transpose(1, 2)
        k = attention.k(x).view(rows, length, 2, 4).transpose(1, 2)
        v = attention.v(x).view(rows, length, 2, 4).transpose(1, 2)
        score, _ = self.functions(document)
        out = flex_attention(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=True)
        return toy.head(x + attention.o(out.transpose(1, 2).reshape(rows, length, 16)))

    def reference(self, input_ids: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        """The same, written out with a mask and a bias for every query and key."""
        toy, attention = self.toy, self.toy.attention
        rows, length = input_ids.shape
        x = toy.embed(input_ids)
        q = attention.q(x).view(rows, length, 4, 4).transpose(1, 2)
        k = attention.k(x).view(rows, length, 2, 4).transpose(1, 2).repeat_interleave(2, 1)
        v = attention.v(x).view(rows, length, 2, 4).transpose(1, 2).repeat_interleave(2, 1)
        places = torch.arange(length)
        scores = q @ k.transpose(-1, -2) / 2.0
        if self.kind == "alibi":
            scores = scores - self.slopes.view(4, 1, 1) * (places[:, None] - places[None, :]).abs()
        if self.kind == "soft_cap":
            scores = torch.tanh(scores / 2.0) * 2.0
        visible = places[:, None] >= places[None, :]
        if self.kind in ("document", "soft_cap"):
            visible = visible & (document[:, None, :, None] == document[:, None, None, :])
        out = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1) @ v
        return toy.head(x + attention.o(out.transpose(1, 2).reshape(rows, length, 16)))


def inputs(kind: str) -> dict[str, Any]:
    ids = toys.batch(LENGTH)["input_ids"]
    document = (torch.arange(LENGTH) // 50).expand(2, LENGTH).contiguous()
    _, mask = Flex(kind).functions(document)
    made = create_block_mask(mask, 2, None, LENGTH, LENGTH, device="cpu")
    return {"input_ids": ids, "document": document, "block_mask": made}


def run_flex(rank_info: Any, kind: str, strategy: str) -> float:
    import autosp

    autosp.initialize({"autosp": {"inner_backend": "aot_eager", "attention": strategy}})
    model, given = Flex(kind), inputs(kind)
    autosp.prepare_autosp_inputs(given["input_ids"])
    with torch.no_grad():
        out = torch.compile(model, backend="autosp")(**given).full_tensor()
        return (out - model.reference(given["input_ids"], given["document"])).abs().max().item()


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("soft_cap", "ulysses"),
        pytest.param("document", "allgather_kv", marks=pytest.mark.slow),
        pytest.param("alibi", "ring", marks=pytest.mark.slow),
        pytest.param("causal", "auto", marks=pytest.mark.slow),
    ],
)
def test_flex_attention_on_a_group(ranks: RankPool, kind: str, strategy: str):
    for error in ranks.run(run_flex, kind, strategy, timeout=240):
        assert error <= 1e-5


class MadeInside(Flex):
    """The block mask is made in the model, which torch does under vmap."""

    def forward(self, input_ids: torch.Tensor, document: torch.Tensor, block_mask: BlockMask | None = None):
        rows, length = input_ids.shape
        _, mask = self.functions(document)
        made = create_block_mask(mask, rows, None, length, length, device="cpu")
        return super().forward(input_ids, document, made)


def run_made_inside(rank_info: Any, kind: str, lengths: list[int]) -> list[float]:
    import autosp

    autosp.initialize({"autosp": {"inner_backend": "aot_eager"}})
    model = MadeInside(kind)
    compiled, found = torch.compile(model, backend="autosp"), []
    for length in lengths:
        ids = toys.batch(length)["input_ids"]
        document = (torch.arange(length) // 50).expand(2, length).contiguous()
        batch = autosp.prepare_batch({"input_ids": ids})
        with torch.no_grad():
            out = compiled(**batch, document=document).full_tensor()
            found.append((out - model.reference(ids, document)).abs().max().item())
    return found


@pytest.mark.parametrize(
    ("kind", "lengths"), [("document", [LENGTH]), pytest.param("causal", [LENGTH, 256, 301], marks=pytest.mark.slow)]
)
def test_a_block_mask_made_in_the_model(ranks: RankPool, kind: str, lengths: list[int]):
    for errors in ranks.run(run_made_inside, kind, lengths, timeout=300):
        assert max(errors) <= 1e-5, errors


@pytest.mark.parametrize("kind", ["causal", "document", "alibi", "soft_cap"])
def test_gradients_of_the_captured_program(kind: str):
    """torch has no backward of ``flex_attention`` on the CPU; the captured program has one."""
    from autosp.capture import capture_graph, fake_inputs

    captured = []

    def backend(gm, example_inputs):
        mode = torch._guards.detect_fake_mode(example_inputs)
        captured.append(capture_graph(gm, fake_inputs(example_inputs, mode), mode, lambda target: True))
        return lambda *args: [x.detach() for x in captured[0](*args)]

    model, given = Flex(kind), inputs(kind)
    seen = []

    def keep(gm, example_inputs):
        compiled = backend(gm, example_inputs)

        def run(*args):
            seen.append(args)
            return compiled(*args)

        return run

    with torch.no_grad():
        torch.compile(model, backend=keep, dynamic=False)(**given)
    names = {id(p): name for name, p in model.named_parameters()}
    assert any(id(x) in names for x in seen[0] if isinstance(x, torch.Tensor))
    upstream = torch.randn(2, LENGTH, toys.VOCAB)
    (out,) = captured[0](*seen[0])
    (out * upstream).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    (model.reference(given["input_ids"], given["document"]) * upstream).sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name not in found), name
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-4)
