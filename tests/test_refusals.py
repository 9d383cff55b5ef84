"""What has no exact form on a shard is refused with operator, line and remedy, or gathered, which is exact."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import toys
from pool import RankInfo, RankPool
from torch import nn
from torch.nn import functional as F

Mix = Callable[["Mixer", torch.Tensor, torch.Tensor], torch.Tensor]
MIXERS: dict[str, tuple[Mix, str, str]] = {}
"""By name: what is done to the hidden states, the operator that the error names, a part of the reason."""


def mixer(operator: str, reason: str) -> Callable[[Mix], Mix]:
    def add(function: Mix) -> Mix:
        MIXERS[function.__name__] = (function, operator, reason)
        return function

    return add


class Mixer(nn.Module):
    """A toy whose hidden states go through one operator that mixes tokens."""

    def __init__(self, mix: str) -> None:
        super().__init__()
        self.toy = toys.build()
        self.conv = nn.Conv1d(16, 16, 3, stride=2, groups=16)
        self.lengthwise = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) * 0.1)
        self.mix = MIXERS[mix][0]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        x = self.toy.hidden(input_ids, None, None, None)
        logits = self.toy.head(self.mix(self, x, input_ids))
        return toys.Out(toys.pad_slice(self.toy, logits, labels), logits)


@mixer("aten.cumsum.default", "mixes the tokens")
def cumsum(model, x, ids):
    return x + x.cumsum(1) * 0.1


@mixer("aten.conv1d.default", "stride")
def conv1d(model, x, ids):
    return x + model.conv(x.transpose(1, 2)).mean(2).unsqueeze(1)


@mixer("aten.flip.default", "rolled or flipped")
def flip(model, x, ids):
    return x + x.flip(1)


@mixer("aten.roll.default", "rolled or flipped")
def roll(model, x, ids):
    return x + x.roll(1, 1)


@mixer("aten.sort.default", "mixes the tokens")
def sort(model, x, ids):
    return x + x.sort(dim=1).values


@mixer("aten.topk.default", "mixes the tokens")
def topk(model, x, ids):
    return x + x.topk(2, dim=1).values.sum(1, keepdim=True)


@mixer("aten.softmax.int", "mixes the tokens")
def softmax_over_tokens(model, x, ids):
    return x * x.softmax(1)


@mixer("aten.logcumsumexp.default", "mixes the tokens")
def logcumsumexp(model, x, ids):
    return x + x.logcumsumexp(1) * 0.1


@mixer("aten.var.dim", "mixes the tokens")
def variance(model, x, ids):
    return x / (1 + x.var(1, keepdim=True))


@mixer("aten.pad.default", "padded")
def pad(model, x, ids):
    return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


@mixer("aten.slice.Tensor", "strided slice")
def strided_slice(model, x, ids):
    return x + x[:, ::2].mean(1, keepdim=True)


@mixer("aten.cat.default", "joined along the sequence")
def cat_prefix(model, x, ids):
    return torch.cat([model.lengthwise[:1, :16].expand(x.shape[0], 1, 16), x], dim=1)[:, 1:] + x


@mixer("aten.unbind.int", "split into pieces")
def unbind(model, x, ids):
    return x + torch.stack(x.unbind(1)[:2]).mean(0).unsqueeze(1)


@mixer("aten.gather.default", "by position")
def gather(model, x, ids):
    order = (torch.arange(x.shape[1]) * 3 % x.shape[1]).view(1, -1, 1).expand(x.shape[0], -1, 16)
    return x + x.gather(1, order)


@mixer("aten._fft_r2c.default", "no rule")
def fft(model, x, ids):
    return x + torch.fft.fft(x, dim=1).real * 0.1


# Refused even with unsupported: "gather".
@mixer("aten.rand_like.default", "random operator")
def rand_like(model, x, ids):
    return x + torch.rand_like(x)


@mixer("aten.randn.default", "random operator")
def randn(model, x, ids):
    return x + torch.randn(x.shape[-1])


@mixer("aten.bernoulli.default", "random operator")
def bernoulli(model, x, ids):
    return x * torch.bernoulli(torch.sigmoid(x.detach()))


@mixer("aten.fill_.Scalar", "in place")
def write_through_a_view(model, x, ids):
    y = x * 1.0
    y.view(x.shape[0], -1)[:, 0].fill_(0.0)
    return y


ALWAYS = ["rand_like", "randn", "bernoulli"]
NEVER_GATHERED = [*ALWAYS, "write_through_a_view"]


def told(run: Callable[[], Any]) -> dict[str, str]:
    """What the error says that a call raises; Dynamo wraps what a backend raises."""
    try:
        run()
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        found = {name: getattr(inner, name, "") for name in ("operator", "location", "remedy")}
        return {"type": type(inner).__name__, "text": str(inner), "shown": str(error), **found}
    return {"type": "ran"}


def compile_and_run(mix: str, unsupported: str) -> None:
    import autosp

    autosp.initialize({"autosp": {"inner_backend": "eager", "unsupported": unsupported}})
    compiled = torch.compile(Mixer(mix), backend="autosp")
    compiled(**autosp.prepare_batch(toys.batch(16)))


def refusals(rank_info: RankInfo, unsupported: str, mixes: list[str]) -> dict[str, dict[str, str]]:
    """One compilation a name in one process; what each error says."""
    found = {}
    for mix in mixes:
        torch._dynamo.reset()
        found[mix] = told(functools.partial(compile_and_run, mix, unsupported))
    return found


@pytest.fixture(scope="module")
def refused(ranks: RankPool) -> dict[str, dict[str, str]]:
    first, second = ranks.run(refusals, "error", list(MIXERS), timeout=300)
    assert first == second, "every rank refuses alike"
    return first


@pytest.mark.parametrize("mix", list(MIXERS))
def test_refused_with_operator_line_and_remedy(refused: dict[str, dict[str, str]], mix: str):
    _, operator, reason = MIXERS[mix]
    error = refused[mix]
    assert error["type"] == "UnsupportedGraphError", error
    assert error["text"] in error["shown"], "the user sees it"
    assert error["operator"] == operator
    assert reason in error["text"]
    assert "test_refusals.py:" in error["location"] and f"in {mix}" in error["location"], error["location"]
    assert error["remedy"] and error["remedy"] in error["text"]
    assert mix not in ALWAYS or "gather" not in error["remedy"], "what stays refused is no advice"


def test_what_gathering_would_not_mend_stays_refused(ranks: RankPool):
    first, _ = ranks.run(refusals, "gather", NEVER_GATHERED)
    assert {name: error["type"] for name, error in first.items()} == dict.fromkeys(
        NEVER_GATHERED, "UnsupportedGraphError"
    )


# Taking a sequence of open length apart into single tokens is refused by Dynamo before it gets here.
GATHERED = [name for name in MIXERS if name not in (*NEVER_GATHERED, "unbind")]
QUICK = ("cumsum", "gather")


@pytest.mark.parametrize(
    "mix", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in GATHERED]
)
def test_gathered_is_exact(ranks: RankPool, mix: str):
    config = {"autosp": {"inner_backend": parity.INNER, "unsupported": "gather"}}
    build = functools.partial(Mixer, mix)
    for results in ranks.run(parity.run_model, build, [toys.batch(16), toys.batch(17)], config=config):
        for result in results:
            result.check()


class BooleanSelection(nn.Module):
    """Logits of the valid tokens only: how many there are depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = toys.build()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.toy.head(self.toy.hidden(input_ids, None, None, None))
        keep = labels != -100
        return F.cross_entropy(logits[keep], labels[keep])


def boolean_selection(rank_info: RankInfo) -> dict[str, str]:
    import autosp

    autosp.initialize({"autosp": {"inner_backend": "eager"}})
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(BooleanSelection(), backend="autosp")
        return told(lambda: compiled(**autosp.prepare_batch(toys.batch(16))))


def test_boolean_mask_indexing(ranks: RankPool):
    for error in ranks.run(boolean_selection):
        assert error["type"] == "UnsupportedGraphError", error
        assert "boolean" in error["text"] and "test_refusals.py:" in error["location"]


class Untold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, features: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        return self.linear(features) + extra


def without_known_inputs(rank_info: RankInfo) -> dict[str, str]:
    import autosp

    autosp.initialize({"autosp": {"inner_backend": "eager"}})
    return told(lambda: torch.compile(Untold(), backend="autosp")(torch.ones(2, 8, 4), torch.ones(4)))


def test_no_recognised_input_lists_the_inputs(ranks: RankPool):
    for error in ranks.run(without_known_inputs):
        assert error["type"] == "UnsupportedGraphError", error
        assert "features (2, 8, 4)" in error["text"] and "extra (4,)" in error["text"]
        assert "prepare_autosp_inputs" in error["remedy"]


def unknown_option(rank_info: RankInfo) -> dict[str, str]:
    import autosp

    autosp.initialize({"autosp": {"inner_backend": "eager"}})
    compiled = torch.compile(toys.build(), backend="autosp", options={"outptus": "full"})
    return told(lambda: compiled(**autosp.prepare_batch(toys.batch(16))))


def test_unknown_option_lists_the_valid_ones(ranks: RankPool):
    for error in ranks.run(unknown_option):
        assert error["type"] == "ConfigError", error
        assert "outptus" in error["text"] and "outputs" in error["text"]


def ranks_differ(rank_info: RankInfo, how: str) -> dict[str, str]:
    """What a rank is told when rank 1 differs from the others."""
    import autosp

    autosp.initialize({"autosp": {"inner_backend": "eager", "verify_timeout": 30.0}})
    odd = rank_info.rank == 1
    batch = toys.batch(16)
    if how == "ids" and odd:
        batch["input_ids"] = batch["input_ids"].flip(1)
    if how == "labels" and odd:
        batch["labels"] = batch["labels"].flip(1)
    if how == "length" and odd:
        batch = toys.batch(20)
    if how == "rows" and odd:
        batch = toys.batch(16, rows=3)
    if how == "dtype" and odd:
        batch["input_ids"] = batch["input_ids"].int()
    model = (
        Mixer("cumsum")
        if how == "refused" and odd
        else toys.build("two_slices" if how == "code" and odd else "pad_slice")
    )
    compiled = torch.compile(model, backend="autosp")
    if how == "second_step":
        compiled(**autosp.prepare_batch({k: v.clone() for k, v in batch.items()})).loss.backward()
        batch = toys.batch(24 if odd else 16)
    return told(lambda: compiled(**autosp.prepare_batch(batch)))


@pytest.mark.parametrize("how", ["ids", "labels", "length", "rows", "dtype", "code", "second_step"])
def test_ranks_that_differ_are_told(ranks: RankPool, how: str):
    world = 3 if how == "ids" else 2
    for error in ranks.run(ranks_differ, how, world_size=world, timeout=100):
        assert error["type"] == "RankMismatchError", error
        assert "rank 1" in error["text"]
        key = {"ids": "input_ids", "labels": "labels"}.get(how)
        assert key is None or f"in {key}" in error["text"]


def test_a_rank_that_refuses_does_not_leave_the_others_waiting(ranks: RankPool):
    first, second = ranks.run(ranks_differ, "refused", timeout=100)
    assert first["type"] == "RankMismatchError", first
    assert second["type"] in ("UnsupportedGraphError", "RankMismatchError"), second
