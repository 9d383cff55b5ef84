"""Sums of gradients that are joined and started early: which, when, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import RankInfo, RankPool

import autosp
from autosp.gradient_sums import JoinGradientSums, join_gradient_sums
from autosp.inner import compile_local


def backward_graph() -> torch.fx.Graph:
    """Two gradients, an exchange, a gradient of another dtype and one more; the sum of a loss is used in between."""
    c10d = torch.ops._c10d_functional
    graph = torch.fx.Graph()

    def call(target: Any, *args: Any, like: torch.Tensor) -> torch.fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = like
        return node

    x = graph.placeholder("x")
    x.meta["val"] = value = torch.empty(8)
    half = torch.empty(8, dtype=torch.bfloat16)

    def summed(gradient: torch.fx.Node, like: torch.Tensor) -> torch.fx.Node:
        start = call(c10d.all_reduce.default, gradient, "sum", "g", like=like)
        return call(c10d.wait_tensor.default, start, like=like)

    used = summed(call(torch.ops.aten.neg.default, x, like=value), value)
    first = summed(call(torch.ops.aten.sin.default, used, like=value), value)
    second = summed(call(torch.ops.aten.cos.default, used, like=value), value)
    low = summed(call(torch.ops.aten.to.dtype, used, torch.bfloat16, like=half), half)
    start = call(c10d.all_to_all_single.default, used, [4, 4], [4, 4], "g", like=value)
    arrived = call(c10d.wait_tensor.default, start, like=value)
    third = summed(call(torch.ops.aten.exp.default, arrived, like=value), value)
    graph.output((first, second, low, third, arrived))
    return graph


def test_sums_of_gradients_are_joined_between_exchanges():
    graph = backward_graph()
    before = [node.target for node in graph.nodes if node.op == "call_function"]
    assert join_gradient_sums(graph) == 3
    graph.lint()
    names = [getattr(node.target, "__name__", str(node.target)).split(".")[0] for node in graph.nodes]
    assert names.count("all_reduce") == 1, "the sum that the backward itself needs stays"
    assert names.count("all_reduce_coalesced") == 3, "one a dtype before the exchange, one behind it"
    exchange = names.index("all_to_all_single")
    assert names[exchange + 1] == "wait_tensor"
    assert names[exchange + 2] == names[exchange + 3] == "all_reduce_coalesced"
    assert names[-1] == "output"
    # The waits of gradients are the last things that the graph does.
    tail = names[names.index("exp") + 1 : -1]
    assert set(tail) == {"all_reduce_coalesced", "getitem", "wait_tensor"}
    kept = [node.target for node in graph.nodes if node.op == "call_function"]
    for target in (torch.ops.aten.sin.default, torch.ops.aten.cos.default, torch.ops.aten.exp.default):
        assert kept.count(target) == before.count(target) == 1


def sums(rank_info: RankInfo) -> bool:
    """The joined graph gives the bits of the plain one; it is run as it stands, on real ranks."""
    import torch.distributed as dist

    group = dist.group.WORLD.group_name
    outputs = []
    for join in (False, True):
        graph = backward_graph()
        for node in graph.nodes:
            node.args = tuple(group if arg == "g" else arg for arg in node.args)
        if join:
            assert join_gradient_sums(graph)
        module = torch.fx.GraphModule({}, graph)
        outputs.append(module(torch.arange(8.0) + rank_info.rank))
    return all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_joined_sums_give_the_same_bits(ranks: RankPool):
    assert ranks.run(sums, timeout=60) == [True, True]


def test_a_graph_without_gradients_stays():
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    assert join_gradient_sums(graph) == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_inductor_joins_sums_when_asked(monkeypatch: pytest.MonkeyPatch, overlap: bool):
    seen: dict[str, Any] = {}
    monkeypatch.setattr("autosp.inner.lookup_backend", lambda name: lambda *args, **kwargs: seen.update(kwargs))
    config = autosp.AutoSPConfig(overlap_communication=overlap)
    compile_local(torch.fx.GraphModule({}, torch.fx.Graph()), [], config)
    patches = seen["config_patches"]
    assert ("post_grad_custom_post_pass" in patches) is overlap
    assert set(patches) <= set(torch._inductor.config.get_config_copy())


def test_a_pass_of_the_user_runs_too_and_keeps_its_say_about_caching():
    seen = []
    both = JoinGradientSums(lambda graph: seen.append(graph))
    graph = backward_graph()
    both(graph)
    assert seen == [graph]
    assert both.uuid() is None, "a plain function cannot be part of a cache key"
    JoinGradientSums([seen.append, seen.append])(graph)
    assert seen == [graph] * 3
    assert JoinGradientSums().uuid() == JoinGradientSums().uuid()
    assert JoinGradientSums(JoinGradientSums()).uuid() != JoinGradientSums().uuid()
