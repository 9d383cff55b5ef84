"""Calls that a trace copies instead of running: the graph is the one that running them gives, or they run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import repeats_check
import torch
import zoo
from torch import fx, nn
from torch.nn import functional as F

import autosp
from autosp import backend, capture, repeats
from autosp.layout.axis import Axis
from autosp.layout.placement import Shard
from autosp.repeat_keys import Keys, Unkeyed

OTHERS = ("llama", "qwen2", "qwen3", "mistral", "phi3", "opt", "bert", "mixtral")


@pytest.fixture
def two_ranks(fake_ranks: Callable[..., None]) -> Any:
    fake_ranks(2, 0)
    torch._dynamo.reset()
    yield autosp.initialize({"autosp": {"inner_backend": "eager"}})
    torch._dynamo.reset()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[repeats.Repeats]:
    """Every `Repeats` of the trace, to ask how many calls it has copied."""
    made: list[repeats.Repeats] = []
    start = repeats.Repeats.__init__

    def spy(self: repeats.Repeats, *args: Any) -> None:
        start(self, *args)
        made.append(self)

    monkeypatch.setattr(repeats.Repeats, "__init__", spy)
    return made


def compiled(model: Callable[..., Any], *inputs: torch.Tensor, **settings: Any) -> list[int]:
    with repeats_check.twice() as seen:
        torch.compile(model, backend=backend.autosp_backend, options=settings)(*inputs)
    return seen


def same_graphs(model: str, checkpointing: bool, tiles: int) -> None:
    built = zoo.build(model)
    if checkpointing:
        built.gradient_checkpointing_enable()
    with repeats_check.twice() as seen:
        step = torch.compile(built, backend=backend.autosp_backend, options={"token_tiles": tiles})
        step(**autosp.prepare_batch(zoo.batch(16)))
    assert len(seen) == 2 and min(seen) > 100


@pytest.mark.parametrize("model, checkpointing, tiles", [("gpt2", False, 1), ("gemma2", True, 3)])
def test_models_have_the_graphs_that_running_every_call_gives(two_ranks, model: str, checkpointing: bool, tiles: int):
    same_graphs(model, checkpointing, tiles)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model", OTHERS)
def test_other_models_have_the_graphs_that_running_every_call_gives(two_ranks, model: str, checkpointing: bool):
    same_graphs(model, checkpointing, 2 if checkpointing else 1)


def test_another_layer_runs_nothing_new(two_ranks, watched: list[repeats.Repeats]):
    runs = []
    for layers in (3, 4):
        watched.clear()
        model = zoo.build("llama", num_hidden_layers=layers)
        torch.compile(model, backend=backend.autosp_backend)(**autosp.prepare_batch(zoo.batch(16)))
        runs.append([len(item._records) for item in watched])
        assert all(item.copied > 20 * (layers - 2) for item in watched)
        torch._dynamo.reset()
    assert runs[0] == runs[1]


class Blocks(nn.Module):
    """One function, three times over."""

    def __init__(self, block: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(16, 8), block
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for weight in self.weights:
            x = self.block(x, weight)
        return x


def in_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, weight)
    y *= 0.5
    y.add_(x)
    return y


def part_by_part(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[..., :4] = F.linear(x, weight)[..., 4:]
    y[..., 4:].copy_(x[..., :4])
    return y * 2


def given_back(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, weight)
    z = y.to(torch.float32).contiguous()
    return z + 1 + y.to(torch.float32)


def given_back_and_written(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, weight)
    z = y.to(torch.float32)
    z.add_(1)
    return z + y


def constants(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = torch.tensor(3.0) * 2
    empty = torch.tensor([], dtype=x.dtype)
    return torch.cat([torch.cat([empty, F.linear(x, weight).flatten()]).view_as(x) * scale, x], dim=-1)[..., :8]


def without_gradients(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        norm = F.linear(x, weight).norm(dim=-1, keepdim=True)
    return F.linear(x, weight) / (1 + norm)


def dropped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.linear(x, weight), 0.5)


def halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    a, b = F.linear(x, weight).chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


@pytest.mark.parametrize("block", [in_place, part_by_part, given_back, constants, without_gradients, dropped, halves])
def test_blocks_have_the_graphs_that_running_every_call_gives(
    two_ranks, watched: list[repeats.Repeats], block: Callable[..., Any]
):
    assert len(compiled(Blocks(block), torch.arange(12).reshape(1, 12) % 16)) >= 2
    assert all(item.copied for item in watched if item.enabled)


def test_a_write_to_what_was_given_back_stays_refused(two_ranks):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="written in place through a view"):
        compiled(Blocks(given_back_and_written), torch.arange(12).reshape(1, 12) % 16)


def test_each_layer_draws_its_own_mask(two_ranks, monkeypatch: pytest.MonkeyPatch):
    graphs: list[fx.GraphModule] = []
    run = backend.run_pipeline

    def spy(work: Any, *args: Any) -> Any:
        graphs.append(run(work, *args).graph)
        return work

    monkeypatch.setattr(backend, "run_pipeline", spy)
    compiled(Blocks(dropped), torch.arange(12).reshape(1, 12) % 16)
    draws = graphs[0].graph.find_nodes(op="call_function", target=torch.ops.aten.randint.low)
    assert len(draws) == 3 and all(draw.users for draw in draws)


class Counted:
    """A function that gives another number at every call."""

    calls = 0


def scaled(x: torch.Tensor) -> torch.Tensor:
    Counted.calls += 1
    return x * Counted.calls


def test_functions_that_are_not_known_run_every_time(fake_ranks):
    mode = torch._subclasses.FakeTensorMode()
    graph = fx.Graph()
    x = node = graph.placeholder("x")
    for _ in range(3):
        node = graph.call_function(scaled, (node,))
    graph.output((node, x))
    gm = fx.GraphModule(nn.Module(), graph)
    Counted.calls = 0
    with mode:
        fake = torch.empty(4)
    traced = capture.capture_graph(gm, [fake], mode, lambda target: True)
    assert [node.args[1] for node in traced.graph.nodes if node.op == "call_function"] == [1, 2, 3]


def closure(number: Any) -> Callable[[], Any]:
    """A rule's local function, as far as a key can tell."""

    def local() -> Any:
        return number

    local.__module__ = "autosp.layout.rules.views"
    return functools.partial(torch.ops.aten.add, local)


def test_keys_tell_apart_what_traces_differ_in():
    keys = Keys()
    assert keys.of(closure(1)) == keys.of(closure(1))
    different: list[Any] = [
        1,
        True,
        1.0,
        "1",
        0.0,
        -0.0,
        (1,),
        [1],
        {"a": 1},
        slice(1),
        torch.float32,
        closure(1),
        closure(2),
    ]
    different += [Axis("sp", 2, 0, "g"), Axis("sp", 2, 1, "g"), Shard(0, 4, 4), Shard(1, 4, 4), Shard(0, 4, 3)]
    found = [keys.of(value) for value in different]
    assert len(set(found)) == len(found)
    assert keys.of(Shard(0, 4, 4)) == keys.of(Shard(0, 4, 4))


@pytest.mark.parametrize(
    "value", [object(), scaled, torch.Generator(), iter(())], ids=["object", "function", "generator", "iterator"]
)
def test_values_of_unknown_kinds_have_no_key(value: Any):
    with pytest.raises(Unkeyed):
        Keys().of(value)


def test_tensors_differ_by_everything_that_a_trace_sees():
    keys = Keys()
    with torch._subclasses.FakeTensorMode():
        values = [
            torch.empty(2, 3),
            torch.empty(3, 2),
            torch.empty(3, 2).t(),
            torch.empty(2, 3, dtype=torch.float64),
            torch.empty(2, 3, requires_grad=True),
            torch.empty(3, 3)[1:],
            torch.empty(2, 3, device="meta"),
        ]
        found = [keys.of_tensor(value) for value in values]
        assert len(set(found)) == len(found)
        assert keys.of_tensor(torch.empty(2, 3)) == found[0]
        with pytest.raises(Unkeyed):
            keys.of_tensor(torch.tensor(1.0))
