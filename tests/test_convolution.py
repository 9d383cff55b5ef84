"""Convolutions along the sequence: a halo of the neighbours' rows where tokens keep their place, refused elsewhere."""

from __future__ import annotations

import functools

import parity
import pytest
import torch
import toys
from pool import RankPool
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from autosp import backend  # noqa: F401 - defines the operators
from autosp.passes.align_convolutions import align_convolutions_pass

FORMS = {
    "causal_slice": lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=16)[..., : x.shape[-1]],
    "causal_pad": lambda x, w, b: F.conv1d(F.pad(x, (3, 0)), w, b, groups=16),
    "same": lambda x, w, b: F.conv1d(x, w[..., :3], b, padding=1, groups=16),
    "same_word": lambda x, w, b: F.conv1d(x, w, b, padding="same", groups=16),
    "dilated": lambda x, w, b: F.conv1d(F.pad(x, (4, 0)), w[..., :3], b, dilation=2, groups=16),
}
OTHER = {
    "valid": lambda x, w, b: F.conv1d(x, w, b, groups=16),
    "strided": lambda x, w, b: F.conv1d(x, w[..., :3], b, stride=2, padding=1, groups=16),
    "half_padded": lambda x, w, b: F.conv1d(F.pad(x, (2, 0)), w, b, groups=16),
    "shifted": lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=16)[..., 1 : x.shape[-1] + 1],
}


class Convolved(nn.Module):
    """A depthwise convolution over tokens in place of attention."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.toy = toys.build()
        self.form = form
        torch.manual_seed(4)
        self.conv = nn.Conv1d(16, 16, 4, groups=16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        toy = self.toy
        x = toy.embed(input_ids)
        mixed = {**FORMS, **OTHER}[self.form](x.transpose(1, 2), self.conv.weight, self.conv.bias)
        if mixed.shape[-1] == x.shape[1]:
            x = x + mixed.transpose(1, 2)
        else:
            x = x + mixed.mean(-1, keepdim=True).transpose(1, 2)
        logits = toy.head(toy.norm(x))
        return toys.Out(toys.pad_slice(toy, logits, labels), logits)


def check_exact(ranks: RankPool, form: str, world: int, lengths: list[int]) -> None:
    build = functools.partial(Convolved, form)
    batches = [toys.batch(n) for n in lengths]
    for results in ranks.run(parity.run_model, build, batches, world_size=world, timeout=240):
        for result in results:
            result.check()


@pytest.mark.parametrize("form", [*FORMS][:1] + [pytest.param(f, marks=pytest.mark.slow) for f in [*FORMS][1:]])
def test_tokens_keep_their_place(ranks: RankPool, form: str):
    check_exact(ranks, form, 3, [16, 17])


@pytest.mark.slow
def test_same_padding_on_two_ranks(ranks: RankPool):
    check_exact(ranks, "same_word", 2, [17])


def refused(rank_info, form: str, length: int, unsupported: str) -> str:
    import autosp

    autosp.initialize({"autosp": {"inner_backend": "eager", "unsupported": unsupported}})
    model = Convolved(form)
    compiled = torch.compile(model, backend="autosp")
    batch = toys.batch(length)
    try:
        out = compiled(**autosp.prepare_batch(batch))
    except Exception as error:
        return str(error)
    return "" if torch.allclose(out.loss, model(**batch).loss, rtol=1e-5) else "wrong"


@pytest.mark.parametrize(
    ("form", "length", "message"),
    [
        ("strided", 16, "a strided convolution changes the length"),
        pytest.param("valid", 16, "a convolution changes the length", marks=pytest.mark.slow),
        pytest.param("half_padded", 16, "a sharded sequence is padded", marks=pytest.mark.slow),
        ("causal_pad", 4, "reaches 3 tokens, farther than a neighbour's"),
    ],
)
def test_other_convolutions_are_refused_or_gathered(ranks: RankPool, form: str, length: int, message: str):
    for found in ranks.run(refused, form, length, "error"):
        assert message in found, found
        assert "conv1d(" in found or "pad" in found, found
    assert ranks.run(refused, form, length, "gather") == ["", ""]


def traced(form: str) -> fx.GraphModule:
    function = {**FORMS, **OTHER}[form]
    args = torch.randn(2, 16, 12), torch.randn(16, 1, 4), torch.randn(16)
    return make_fx(function, pre_dispatch=True, tracing_mode="fake")(*args)


@pytest.mark.parametrize("form", [*FORMS, *OTHER])
def test_forms_become_one_operator(form: str):
    gm = traced(form)
    before = str(gm.graph)
    after = align_convolutions_pass(gm)
    nodes = after.graph.find_nodes(op="call_function", target=torch.ops.autosp.token_conv1d.default)
    assert bool(nodes) == (form in ("causal_slice", "causal_pad", "dilated"))
    if not nodes:
        assert str(after.graph) == before
    args = torch.randn(2, 16, 12), torch.randn(16, 1, 4), torch.randn(16)
    torch.testing.assert_close(after(*args), {**FORMS, **OTHER}[form](*args), rtol=1e-5, atol=1e-5)
    text = str(after.graph)
    assert str(align_convolutions_pass(after).graph) == text


def test_opcheck():
    x, w, b = torch.randn(2, 16, 12), torch.randn(16, 1, 4), torch.randn(16)
    args = [t.requires_grad_() for t in (x, w, b)]
    torch.library.opcheck(torch.ops.autosp.token_conv1d.default, (*args, 3, 1, 16))
    torch.library.opcheck(torch.ops.autosp.token_conv1d.default, (*args[:2], None, 1, 1, 16))
