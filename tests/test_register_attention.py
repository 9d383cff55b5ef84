"""A kernel library's attention joins by one call, also behind transformers' attention interface."""

from __future__ import annotations

from typing import Any

import kernel_attention
import parity
import pytest
import torch
import toys
import zoo
from pool import RankPool
from torch import nn

import autosp
from autosp.errors import InputError


class Kernel(nn.Module):
    """A layer around one of the two operators."""

    def __init__(self, varlen: bool) -> None:
        super().__init__()
        self.toy = toys.build(heads=6, kv_heads=3)
        self.varlen = varlen

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, starts: torch.Tensor | None = None) -> toys.Out:
        toy, attention = self.toy, self.toy.attention
        rows, length = input_ids.shape
        x = toy.embed(input_ids)
        q = attention.q(x).view(rows, length, 6, 4)
        k = attention.k(x).view(rows, length, 3, 4)
        v = attention.v(x).view(rows, length, 3, 4)
        if self.varlen:
            out = torch.ops.autosp_test.flash_varlen(q[0], k[0], v[0], starts, 0.5)[None]
        else:
            out, _ = torch.ops.autosp_test.flash(q, k, v, 0.5)
        logits = toy.head(x + attention.o(out.reshape(rows, length, 24)))
        return toys.Out(toys.pad_slice(toy, logits, labels), logits)


def run_kernel(rank_info: Any, varlen: bool, strategy: str, inner: str) -> list[parity.Result]:
    kernel_attention.register()
    rows = 1 if varlen else 2
    more = {"starts": torch.tensor([0, 5, 12])} if varlen else {}
    batches = [{**toys.batch(n, rows=rows), **more} for n in (16, 17)]
    config = {"autosp": {"inner_backend": inner, "attention": strategy}}
    return parity.run_model(rank_info, lambda: Kernel(varlen), batches, config=config)


@pytest.mark.parametrize("varlen", [pytest.param(False, marks=pytest.mark.slow), True], ids=["rows", "packed"])
def test_a_kernel_attends_with_a_block_of_heads(ranks: RankPool, inner: str, varlen: bool):
    for results in ranks.run(run_kernel, varlen, "auto", inner, timeout=240):
        for result in results:
            result.check()


def run_refused(rank_info: Any) -> str:
    try:
        run_kernel(rank_info, False, "ring", "eager")
    except Exception as error:
        return str(error)
    return ""


def test_a_kernel_cannot_attend_in_blocks(ranks: RankPool):
    for message in ranks.run(run_refused):
        assert 'attention: "ring" cannot serve this call: its operator works on whole sequences only' in message
        assert '"ulysses"' in message


def run_transformers(rank_info: Any) -> list[parity.Result]:
    from transformers import AttentionInterface

    kernel_attention.register()
    AttentionInterface.register("autosp_test_kernel", kernel_attention.transformers_attention)
    build = lambda: zoo.build("llama", num_hidden_layers=1, attn_implementation="autosp_test_kernel")  # noqa: E731
    return parity.run_model(rank_info, build, [zoo.batch(17)])


@pytest.mark.slow
def test_behind_the_attention_interface_of_transformers(ranks: RankPool):
    for results in ranks.run(run_transformers, timeout=300):
        for result in results:
            result.check()


def test_bad_registrations():
    with pytest.raises(InputError, match="layout is 'dhsb'; allowed: 'bhsd', 'bshd', 'shd'"):
        autosp.register_attention(torch.ops.autosp_test.flash.default, layout="dhsb")
    with pytest.raises(InputError, match="has no argument query; it takes q, k, v, scale"):
        autosp.register_attention(torch.ops.autosp_test.flash.default, query="query")
