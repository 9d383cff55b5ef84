"""Each pass on small graphs in one process: it rewrites, leaves others alone, is done after one run, and refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from autosp import backend  # noqa: F401
from autosp.errors import InternalError, UnsupportedGraphError
from autosp.layout.axis import Axis
from autosp.layout.infer import LAYOUT, STRATEGY, Source, infer_layouts
from autosp.layout.placement import Shard, shard_of_dim
from autosp.passes.functionalize_inplace import functional_form, functionalize_inplace_pass
from autosp.passes.localize import LocalInterpreter, localize_graph
from autosp.passes.move_slices_up import move_slices_up_pass
from autosp.passes.pipeline import PIPELINE, Pass, check_order
from autosp.passes.verify import collective_list, verify_local_graph_pass

aten = torch.ops.aten


def trace(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake", pre_dispatch=True)(*inputs)


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


# In-place operators.


def written_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    before = y + 1
    y.add_(1)
    y.mul_(3)
    return y + before


def test_functionalize_rewrites():
    x = torch.randn(3)
    gm = trace(written_in_place, x)
    assert "aten.add_.Tensor" in targets(gm) and "aten.mul_.Tensor" in targets(gm)
    out = functionalize_inplace_pass(gm)
    assert not [name for name in targets(out) if "_." in name]
    torch.testing.assert_close(out(x), written_in_place(x))


def test_functionalize_leaves_other_graphs_alone():
    gm = trace(lambda x: F.gelu(x).transpose(0, 1) @ x, torch.randn(3, 3))
    before = str(gm.graph)
    functionalize_inplace_pass(gm)
    assert str(gm.graph) == before


def test_functionalize_is_done_after_one_run():
    gm = functionalize_inplace_pass(trace(written_in_place, torch.randn(3)))
    before = str(gm.graph)
    functionalize_inplace_pass(gm)
    assert str(gm.graph) == before


def test_functionalize_keeps_writes_to_buffers():
    def count(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        buffer.add_(1)
        return x * buffer

    gm = functionalize_inplace_pass(trace(count, torch.randn(3), torch.zeros(3)))
    assert "aten.add_.Tensor" in targets(gm)


def chained(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.mul_(3).add_(1)
    y.sub_(2)
    z.mul_(5)
    return y + z


def test_functionalize_rewrites_chains():
    x = torch.randn(3)
    out = functionalize_inplace_pass(trace(chained, x))
    assert not [name for name in targets(out) if "_." in name]
    torch.testing.assert_close(out(x), chained(x))


def test_functionalize_keeps_chained_writes_to_buffers():
    def average(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        buffer.mul_(0.9).add_(x)
        return x * buffer

    gm = functionalize_inplace_pass(trace(average, torch.randn(3), torch.ones(3)))
    found, expected = torch.ones(3), torch.ones(3)
    x = torch.randn(3)
    torch.testing.assert_close(gm(x, found), average(x, expected))
    torch.testing.assert_close(found, expected)


def through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[0].add_(1)
    return y


def view_read_afterwards(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    view = y.view(-1)
    y.add_(1)
    return view + 1


def view_returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    view = y.t()
    y.add_(1)
    return view, y


def view_of_a_chain(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    view = y.mul_(3).view(-1)
    y.add_(1)
    return view + 1


@pytest.mark.parametrize("function", [through_a_view, view_read_afterwards, view_returned, view_of_a_chain])
def test_functionalize_refuses_and_changes_nothing(function: Callable[..., Any]):
    gm = trace(function, torch.randn(3, 3))
    before = str(gm.graph)
    with pytest.raises(UnsupportedGraphError, match="in place") as caught:
        functionalize_inplace_pass(gm)
    assert caught.value.remedy
    assert str(gm.graph) == before


def test_functionalize_keeps_the_dtype():
    """``y += wide`` leaves ``y`` as narrow as it was; ``y + wide`` would be wide."""

    def narrow(x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(wide)
        return y * 1

    x, wide = torch.randn(3, dtype=torch.bfloat16), torch.randn(3)
    gm = functionalize_inplace_pass(trace(narrow, x, wide))
    result = gm(x, wide)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, narrow(x, wide))


def test_functional_forms():
    assert functional_form(aten.add_.Tensor) is aten.add.Tensor
    assert functional_form(aten.masked_fill_.Scalar) is aten.masked_fill.Scalar
    assert functional_form(aten.add.Tensor) is None


# Layouts, local programs, slices. A fake group of two ranks.


@pytest.fixture
def axis(fake_ranks: Callable[..., None]) -> Axis:
    import autosp

    fake_ranks(2, 1)
    state = autosp.initialize({"autosp": {"inner_backend": "eager"}})
    return Axis("sp", 2, state.sp_rank, state.sp_group)


def toy(ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = F.embedding(ids, table)
    position = torch.arange(ids.shape[1]).unsqueeze(-1)
    x = x + torch.cos(position * 0.5)
    return F.linear(x, weight).sum()


INPUTS = (torch.ones(2, 7, dtype=torch.long), torch.randn(5, 4), torch.randn(3, 4))


def annotated(axis: Axis, function: Callable[..., Any] = toy, inputs: tuple[torch.Tensor, ...] = INPUTS) -> Any:
    gm = trace(function, *inputs)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    sources = {names[0]: Source(home=shard_of_dim(inputs[0].shape, 1))}
    assert infer_layouts(gm, axis=axis, sources=sources) == []
    return gm


def localized(axis: Axis, gm: fx.GraphModule, outputs: str = "dtensor") -> Any:
    placeholders = gm.graph.find_nodes(op="placeholder")
    fakes = [node.meta["val"] for node in placeholders]
    return localize_graph(
        gm,
        fakes,
        axis=axis,
        parameters=frozenset(node.name for node in placeholders[1:]),
        outputs=outputs,
        fake_mode=fakes[0].fake_mode,
    )


def test_infer_annotates_every_node(axis: Axis):
    gm = annotated(axis)
    layouts = {str(node.target): str(node.meta[LAYOUT]) for node in gm.graph.nodes if node.op != "output"}
    assert layouts["aten.embedding.default"] == "shard(dim 1, 7)"
    assert layouts["aten.linear.default"] == "shard(dim 1, 7)"
    assert layouts["aten.cos.default"] == "replicate"
    assert layouts["aten.sum.default"] == "partial(sum)"


def test_infer_leaves_a_graph_without_tokens_whole(axis: Axis):
    gm = trace(lambda x: F.gelu(x) + 1, torch.randn(2, 4))
    infer_layouts(gm, axis=axis, sources={})
    assert {str(node.meta[LAYOUT]) for node in gm.graph.nodes if node.op != "output"} == {"replicate"}


def test_move_slices_up_rewrites(axis: Axis):
    gm = move_slices_up_pass(annotated(axis))
    by_target = {str(node.target): node for node in gm.graph.nodes}
    for name in ("aten.cos.default", "aten.mul.Tensor", "aten.arange.default"):
        assert isinstance(by_target[name].meta[LAYOUT], Shard), name
    local, _ = localized(axis, gm)
    cosine = next(node for node in local.graph.nodes if node.target is aten.cos.default)
    assert tuple(cosine.meta["val"].shape) == (4, 1), "positions of this rank's tokens only"


def test_move_slices_up_leaves_what_is_used_whole(axis: Axis):
    def both(ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> Any:
        wave = torch.cos(torch.arange(ids.shape[1]).unsqueeze(-1) * 0.5)
        return F.linear(F.embedding(ids, table) + wave, weight).sum(), wave

    gm = move_slices_up_pass(annotated(axis, both))
    cosine = next(node for node in gm.graph.nodes if node.target is aten.cos.default)
    assert str(cosine.meta[LAYOUT]) == "replicate"


def test_move_slices_up_is_done_after_one_run(axis: Axis):
    gm = move_slices_up_pass(annotated(axis))
    before = [(node.name, str(node.meta.get(LAYOUT))) for node in gm.graph.nodes]
    strategies = [node.meta.get(STRATEGY) for node in gm.graph.nodes]
    move_slices_up_pass(gm)
    assert [(node.name, str(node.meta.get(LAYOUT))) for node in gm.graph.nodes] == before
    for node, strategy in zip(gm.graph.nodes, strategies, strict=True):
        assert (node.meta.get(STRATEGY) is None) == (strategy is None)


def test_localize_makes_the_program_of_one_rank(axis: Axis):
    local, specs = localized(axis, annotated(axis))
    embedding = next(node for node in local.graph.nodes if node.target is aten.embedding.default)
    assert tuple(embedding.meta["val"].shape) == (2, 4, 4), "ceil(7 / 2) tokens"
    assert collective_list(local)[-1] == "autosp::all_reduce_sum"
    assert [spec.shard for spec in specs] == [None]
    assert [node.name for node in local.graph.find_nodes(op="placeholder")][0]


def test_localize_gives_sharded_outputs_and_their_lengths(axis: Axis):
    def logits(ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(F.embedding(ids, table), weight)

    local, specs = localized(axis, annotated(axis, logits))
    (shard,) = [spec.shard for spec in specs]
    assert isinstance(shard, Shard) and (shard.dim, shard.length) == (1, 7)
    output = local.graph.find_nodes(op="output")[0].args[0]
    assert output[specs[0].length_index] == 7
    whole, specs = localized(axis, annotated(axis, logits), outputs="full")
    assert specs[0].shard is None
    assert collective_list(whole)[-1] == "autosp::all_gather_sequence"


def test_localize_leaves_a_whole_graph_alone(axis: Axis):
    gm = trace(lambda x: (F.gelu(x) + 1).sum(), torch.randn(2, 4))
    infer_layouts(gm, axis=axis, sources={})
    local, _ = localized(axis, gm)
    assert targets(local) == targets(gm)


def test_localize_checks_what_a_rule_promised(axis: Axis):
    gm = annotated(axis)
    node = next(node for node in gm.graph.nodes if node.target is aten.linear.default)
    wrong = node.meta[STRATEGY]
    node.meta[STRATEGY] = type(wrong)(inputs=wrong.inputs, output=wrong.output, local=lambda c, local: local["input"])
    with pytest.raises(InternalError, match="promises"):
        localized(axis, gm)


def test_verify_accepts_and_changes_nothing(axis: Axis):
    local, _ = localized(axis, annotated(axis))
    before = str(local.graph)
    verify_local_graph_pass(local, axis=axis)
    verify_local_graph_pass(local, axis=axis)
    assert str(local.graph) == before


def test_verify_refuses_another_group_and_unused_collectives(axis: Axis):
    local, _ = localized(axis, annotated(axis))
    with pytest.raises(InternalError, match="does not run over the group"):
        verify_local_graph_pass(local, axis=Axis("sp", 2, 1, "another group"))
    reduce = next(node for node in local.graph.nodes if node.target is torch.ops.autosp.all_reduce_sum.default)
    with local.graph.inserting_after(reduce):
        local.graph.call_function(reduce.target, reduce.args)
    with pytest.raises(InternalError, match="nobody uses"):
        verify_local_graph_pass(local, axis=axis)


def test_rank_zero_and_rank_one_make_the_same_collectives(axis: Axis):
    one, _ = localized(axis, annotated(axis))
    other_axis = Axis("sp", 2, 0, axis.group)
    other, _ = localized(other_axis, annotated(other_axis))
    assert collective_list(one) == collective_list(other) != []


def test_interpreter_moves_a_value_once(axis: Axis):
    """A whole table that two operators use in shards is cut once."""

    def twice(ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids, table)
        scale = ids.sum(0, keepdim=True).cumsum(1).unsqueeze(-1)
        return (x * scale + scale).sum()

    gm = annotated(axis, twice)
    local, _ = localized(axis, gm)
    cuts = [name for name in collective_list(local) if name == "autosp::shard_sequence"]
    assert len(cuts) == 2, "the ids and the scale"
    assert LocalInterpreter.__doc__


# The order of the passes.


def test_pipeline_order_is_valid_and_every_pass_says_why():
    check_order(PIPELINE)
    names = [entry.name for entry in PIPELINE]
    known = ["functionalize_inplace", "infer_layouts", "move_slices_up", "localize", "verify"]
    assert [name for name in names if name in known] == known
    assert len(set(names)) == len(names) and names[-1] == "verify"
    assert all(entry.reason and entry.ensures for entry in PIPELINE)


@pytest.mark.parametrize("name", ["functionalize_inplace", "infer_layouts", "localize"])
def test_pipeline_refuses_a_missing_pass(name: str):
    rest = [entry for entry in PIPELINE if entry.name != name]
    with pytest.raises(InternalError, match="no earlier pass ensures"):
        check_order(rest)


def test_pipeline_refuses_a_wrong_order():
    def unreachable(work: Any) -> None:
        raise AssertionError("the order is checked before any pass runs")

    backwards = [Pass(e.name, unreachable, e.requires, e.ensures, e.reason) for e in reversed(PIPELINE)]
    with pytest.raises(InternalError, match="verify requires"):
        check_order(backwards)
