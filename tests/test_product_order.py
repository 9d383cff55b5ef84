"""Matrix products run in the order in which they stand where stretches of the graph run in parts of the tokens."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import zoo
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig, LlamaForCausalLM

import autosp
from autosp.gradient_sums import JoinGradientSums
from autosp.product_order import KeepProductsInOrder, keep_products_in_order

WIDE = 320


def test_each_product_waits_for_the_one_before():
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x @ y).exp(), (y @ x).sin(), x @ x

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    gm = make_fx(function)(x, y)
    before = gm(x, y)
    assert keep_products_in_order(gm.graph) == 2
    gm.graph.lint()
    gm.recompile()
    waiting = [node for node in gm.graph.nodes if "control_deps" in str(node.target)]
    assert [[dep.name for dep in node.args[0]] for node in waiting] == [["mm"], [waiting[0].name]]
    for a, b in zip(before, gm(x, y), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_graph_without_products_stays():
    gm = make_fx(lambda x: x.exp())(torch.randn(4))
    text = str(gm.graph)
    assert keep_products_in_order(gm.graph) == 0 and str(gm.graph) == text


def test_it_is_cached_only_where_the_pass_before_it_is():
    assert KeepProductsInOrder(None).uuid() == KeepProductsInOrder(None).uuid() is not None
    assert KeepProductsInOrder(JoinGradientSums()).uuid() != KeepProductsInOrder(None).uuid()
    assert KeepProductsInOrder(JoinGradientSums(lambda graph: None)).uuid() is None


def test_passes_that_it_is_given_run_first():
    seen: list[int] = []
    gm = make_fx(lambda x: (x @ x, x.t() @ x))(torch.randn(4, 4))
    count = len(gm.graph.nodes)
    for first in (lambda graph: seen.append(len(graph.nodes)), [lambda graph: seen.append(len(graph.nodes))] * 2):
        KeepProductsInOrder(first)(make_fx(lambda x: (x @ x, x.t() @ x))(torch.randn(4, 4)).graph)
    assert seen == [count] * 3


def most_alive(code: str) -> int:
    """Values as wide as the MLP that the generated code has at once, at most."""
    alive: set[str] = set()
    most = 0
    for line in code.splitlines():
        made = re.match(rf"\s+(buf\d+) = empty_strided_cpu\(\(.*\b{WIDE}\), \(", line)
        reused = re.match(r"\s+(buf\d+) = .*; del (buf\d+)\s+# reuse", line)
        freed = re.match(r"\s+del (buf\d+)$", line)
        if made and re.search(r"\bs\d+\b", line):
            alive.add(made.group(1))
        elif reused and reused.group(2) in alive:
            alive = alive - {reused.group(2)} | {reused.group(1)}
        elif freed:
            alive.discard(freed.group(1))
        most = max(most, len(alive))
    return most


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_wide_values_of_one_part_are_gone_before_the_next(
    overlap: bool, fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    from torch._inductor.utils import fresh_cache, run_and_get_code

    from autosp.backend import autosp_backend

    fake_ranks(2)
    torch._dynamo.reset()
    section = {"verify": "compile", "token_tiles": 4, "overlap_communication": overlap}
    autosp.initialize({"autosp": section})
    config = LlamaConfig(
        hidden_size=64, intermediate_size=WIDE, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=zoo.VOCAB, use_cache=False,
    )  # fmt: skip
    compiled = torch.compile(LlamaForCausalLM(config).train(), backend=autosp_backend)
    with fresh_cache():
        _, code = run_and_get_code(lambda: compiled(**autosp.prepare_batch(zoo.batch(512))).loss.backward())
    assert len(code) == 2
    assert 3 <= most_alive(code[1]) <= 7, "gate, up and their gradients of one part"
    assert most_alive(code[0]) <= 4
