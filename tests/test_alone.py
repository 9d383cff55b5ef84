"""A rank without a sequence group: the same masks, the same losses and the same settings of memory, exact."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import parity
import pytest
import torch
import toys
import zoo
from masked_toys import MaskedToy
from test_fit_memory import Choices
from test_inner import saved_and_backward
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.cpu_vec_isa import pick_vec_isa

import autosp
from autosp import mesh
from autosp.backend import autosp_backend, compile_for_rank
from autosp.passes.peel_repeat_kv import has_grouped_kernel

LENGTH = 37
PACKED = torch.cat([torch.arange(15), torch.arange(LENGTH - 15)])[None]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Nothing compiled before, nothing initialised after."""
    torch._dynamo.reset()
    yield
    mesh.reset()


def initialize(**section: Any) -> mesh.AutoSPState:
    return autosp.initialize({"autosp": {"inner_backend": "aot_eager", **section}})


class Seen:
    """What the inner backend is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._dynamo import lookup_backend

        self.graphs: list[fx.GraphModule] = []

        def look(name: str) -> Callable[..., Any]:
            def compiler(gm: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
                self.graphs.append(gm)
                return lookup_backend(name)(gm, inputs, **settings)

            return compiler

        monkeypatch.setattr("autosp.inner.lookup_backend", look)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def is_square(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and sum(size == LENGTH for size in value.shape) > 1


def squares(gm: fx.GraphModule) -> list[str]:
    """Values of queries x keys in a graph of Dynamo's or of ours."""
    return [n.name for n in gm.graph.nodes if is_square(n.meta.get("val", n.meta.get("example_value")))]


def plain_squares(model: nn.Module, batch: dict[str, Any]) -> list[str]:
    """The same in the forward that AOTAutograd makes of the plain model; eager transformers make no causal mask."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    torch.compile(model, backend=aot_autograd(fw_compiler=keep), dynamic=False)(**batch)
    torch._dynamo.reset()
    return squares(graphs[0])


def llama(**changes: Any) -> nn.Module:
    return zoo.build("llama", **{"num_hidden_layers": 1, **changes})


def mistral() -> nn.Module:
    return zoo.build("mistral", num_hidden_layers=1)


def one_row(length: int = LENGTH, **more: Any) -> dict[str, Any]:
    """Of one row without a cache transformers make a mask, since it may hold several documents."""
    return zoo.batch(length, rows=1, use_cache=False, **more)


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, 30:] = 0
    batch = zoo.batch(LENGTH, attention_mask=mask)
    batch["labels"][1, 30:] = -100
    return batch


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], str]] = {
    "causal, one row": (llama, one_row, "scaled_dot_product_attention"),
    "a window": (mistral, one_row, "block_attention"),
    "packed": (llama, lambda: one_row(position_ids=PACKED), "block_attention"),
    "padding": (llama, padded, "block_attention"),
}


def compare(model: nn.Module, batch: dict[str, Any], compiled: Any = None) -> parity.Result:
    if compiled is None:
        compiled = torch.compile(model, backend=autosp_backend, dynamic=False)
    return parity.compare(model, compiled, batch, prepare=dict)


@pytest.mark.parametrize("name", MODELS)
def test_no_mask_of_queries_and_keys_is_left(name: str, seen: Seen) -> None:
    make, batch, operator = MODELS[name]
    model = make().train()
    assert plain_squares(model, batch()), "what looks for the mask must see it where it is"
    initialize(inner_backend=parity.INNER)
    compare(model, batch()).check()
    (gm,) = seen.graphs
    assert squares(gm) == []
    attention = [node for node in gm.graph.nodes if operator in str(node.target)]
    assert len(attention) == 1
    assert all(x.meta["val"].shape[1] == 2 for x in attention[0].args[1:3]), "two key heads, not repeated"
    if operator == "scaled_dot_product_attention":
        assert len(attention[0].all_input_nodes) == 3, "no mask"
        assert attention[0].kwargs["is_causal"] and attention[0].kwargs["enable_gqa"]


def test_one_program_for_lengths_that_differ(seen: Seen) -> None:
    initialize(inner_backend=parity.INNER)
    model = llama()
    compiled = torch.compile(model, backend=autosp_backend)
    for length in (16, 23, 31):
        compare(model, one_row(length), compiled).check()
    assert len(seen.graphs) == 2


def test_masks_and_the_loss_together(seen: Seen) -> None:
    initialize(inner_backend=parity.INNER, fuse_linear_cross_entropy="always")
    compare(mistral(), one_row()).check()
    names = {str(node.target) for node in seen.graphs[0].graph.nodes}
    assert {"autosp.block_attention.default", "autosp.linear_cross_entropy_loss.default"} <= names


def test_checkpointing_can_keep_what_attention_gives() -> None:
    least, again = saved_and_backward(1.0, checkpoint=True)
    more, kept = saved_and_backward(1.0, checkpoint=True, keeps="attention")
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (again[attention], kept[attention]) == (1, 0)
    assert again["mm"] == kept["mm"], "the rest is recomputed as before"
    assert least < more


def test_exact_where_checkpointing_keeps_attention() -> None:
    initialize(checkpointing_keeps="attention")
    model = llama(num_hidden_layers=2).train()
    model.gradient_checkpointing_enable()
    compare(model, one_row()).check()


def test_a_budget_saves_less_and_never_attends_again() -> None:
    full, plain = saved_and_backward(1.0)
    least, recomputed = saved_and_backward(0.3)
    assert least < full and recomputed["mm"] > plain["mm"], "matrix products are recomputed"
    assert recomputed["_scaled_dot_product_flash_attention_for_cpu"] == 0


def test_exact_under_a_budget() -> None:
    initialize(activation_memory_budget=0.3)
    compare(llama(), one_row()).check()


def test_auto_takes_the_largest_budget_that_fits() -> None:
    initialize(activation_memory_budget="auto", step_memory_gib=1.0)
    model, batch = MaskedToy("window"), toys.batch(LENGTH)
    with Choices() as roomy:
        compare(model, batch).check()
    ((full, most),) = roomy.found
    torch._dynamo.reset()
    initialize(activation_memory_budget="auto", step_memory_gib=0.98 * most / 2**30)
    with Choices() as tight:
        compare(model, batch).check()
    ((less, needed),) = tight.found
    assert less < full == 1.0 and needed < most


def test_auto_tries_offloading_and_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles need layouts; the first way has too little room, and the last one takes what it gets."""
    from autosp import inner

    ways: list[tuple[Any, Any]] = []
    settings = inner._partitioner_settings

    def look(config: Any, fit: Any) -> Any:
        ways.append((config.token_tiles, config.activation_offloading))
        # moving to the host is CUDA's
        return settings(config.model_copy(update={"activation_offloading": False}), fit)

    monkeypatch.setattr(inner, "_partitioner_settings", look)
    with pytest.warns(UserWarning, match="sequence_parallel_size is 1"):
        initialize(
            activation_memory_budget="auto", step_memory_gib=1e-5, activation_offloading="auto", token_tiles="auto"
        )
    with Choices() as choices:
        compare(MaskedToy("window"), toys.batch(LENGTH)).check()
    assert ways == [(1, False), (1, True)]
    assert choices.too_large == choices.warned == 1


def test_auto_asks_nothing_where_no_gradient_is_wanted(seen: Seen) -> None:
    """There is no CUDA device to ask, which a training step is told."""
    initialize(activation_memory_budget="auto")
    model, batch = llama(), one_row()
    compiled = torch.compile(model, backend=autosp_backend, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits)
    with pytest.raises(Exception, match="asks a CUDA device for its memory"):
        compiled(**batch)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode: Callable[[], Any], seen: Seen) -> None:
    initialize(fuse_linear_cross_entropy="always")
    model, batch = mistral().eval(), one_row()
    del batch["labels"]
    with mode():
        out = torch.compile(model, backend=autosp_backend, dynamic=False)(**batch)
        torch.testing.assert_close(out.logits, model(**batch).logits, rtol=1e-5, atol=1e-5)
    assert squares(seen.graphs[0]) == []


def test_under_autocast(seen: Seen) -> None:
    initialize()
    with torch.autocast("cpu", torch.bfloat16):
        compare(mistral(), one_row()).check(2e-2)
    assert squares(seen.graphs[0]) == []


class Given(nn.Module):
    """Attention with a mask from outside."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


class Plain(nn.Linear):
    """No attention, and no loss."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + mask.sum()


@pytest.mark.parametrize("make", [Given, lambda: Plain(8, 8)], ids=["mask given", "no attention"])
def test_a_graph_with_nothing_to_rewrite_stays_dynamos_own(make: Callable[[], nn.Module]) -> None:
    given: list[fx.GraphModule] = []
    compiled: list[fx.GraphModule] = []
    state = initialize(fuse_linear_cross_entropy="always")

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        given.append(gm)
        return compile_for_rank(gm, inputs, state, compiler=lambda gm, _: compiled.append(gm) or gm)

    x, mask = torch.randn(1, 2, 5, 8), torch.ones(5, 5, dtype=torch.bool).tril()
    model = make()
    torch.testing.assert_close(torch.compile(model, backend=backend)(x, mask), model(x, mask))
    assert given and given == compiled


def test_nothing_is_captured_without_attention_and_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosp.alone.capture_graph", lambda *_: pytest.fail("captured"))
    initialize(activation_memory_budget=0.5, fuse_linear_cross_entropy="always")
    model, x = Plain(8, 8), torch.randn(3, 8)
    torch.testing.assert_close(torch.compile(model, backend=autosp_backend)(x, x), model(x, x))


class Refused(MaskedToy):
    """A masked toy with an operator that cannot be captured."""

    def finish(self, x: torch.Tensor, out: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        return super().finish(torch.cond(labels.sum() > 0, torch.sin, torch.cos, (x,)), out, labels)


def test_what_is_refused_is_compiled_as_it_is(caplog: pytest.LogCaptureFixture, seen: Seen) -> None:
    initialize(inner_backend="eager", checkpointing_keeps="attention")
    with caplog.at_level(logging.WARNING, "autosp"):
        compare(Refused("window"), toys.batch(LENGTH)).check()
    (text,) = {record.getMessage() for record in caplog.records if record.name == "autosp"}
    assert "attention masks stay and the LM head is not fused into its loss in this graph" in text
    assert "checkpointing_keeps has no effect there" in text and "higher-order" in text
    assert squares(seen.graphs[0])


def test_what_cannot_be_traced_is_compiled_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such trace")

    monkeypatch.setattr("autosp.alone.capture_graph", broken)
    initialize()
    compare(MaskedToy("window"), toys.batch(LENGTH)).check()
    assert "it cannot be traced: RuntimeError: no such trace" in caplog.text


def test_tensor_subclasses_are_left_to_torch(fake_ranks: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    fake_ranks(1)
    state = initialize()
    assert state.mesh is not None
    x = torch.randn(1, 2, 6, 4)
    arrived = DTensor.from_local(x, state.mesh["tp"], [Replicate()])

    def attend(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[2])
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=places[None] <= places[:, None])

    with torch.no_grad():
        out = torch.compile(lambda given: attend(given.to_local()), backend=autosp_backend)(arrived)
    torch.testing.assert_close(out, attend(x))
    assert "an input is a DTensor" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "sizes", "device", "mask", "expected"),
    [
        (torch.bfloat16, (64, 64), "cuda:0", False, True),
        (torch.float32, (64, 64), "cuda:0", False, False),
        (torch.bfloat16, (64, 32), "cuda:0", False, False),
        (torch.bfloat16, (512, 512), "cuda:0", False, False),
        (torch.bfloat16, (64, 64), "cuda:0", True, False),
        (torch.float32, (64, 32), "cpu", True, True),
    ],
)
def test_heads_stay_repeated_where_torch_has_the_plain_kernel_alone(
    dtype: torch.dtype, sizes: tuple[int, int], device: str, mask: bool, expected: bool
) -> None:
    """The plain kernel holds queries x keys scores."""
    graph = fx.Graph()
    with torch._subclasses.FakeTensorMode():
        values = [torch.empty(1, 4, 8, size, dtype=dtype, device=device) for size in (sizes[0], *sizes)]
    operands = [graph.placeholder(name) for name in ("q", "k", "v")]
    for node, value in zip(operands, values, strict=True):
        node.meta["val"] = value
    more = (graph.placeholder("mask"),) if mask else ()
    node = graph.call_function(torch.ops.aten.scaled_dot_product_attention.default, (*operands, *more))
    node.meta["val"] = values[2]
    assert has_grouped_kernel(node) is expected


def test_inductor_is_told_nothing_of_collectives() -> None:
    """Programs of one rank and a plain one differ in no setting but whether freed buffers go back (and, on a CPU, in
    the width of vectors being said)."""
    state = initialize(inner_backend="inductor", checkpointing_keeps="attention")
    patches: list[Any] = []

    def compiler(gm: fx.GraphModule, inputs: Any, config_patches: Any) -> Any:
        patches.append(config_patches)
        return gm

    backend = functools.partial(compile_for_rank, state=state, compiler=compiler)
    torch.compile(llama(), backend=backend, dynamic=False)(**one_row())
    assert patches == [{"cpp.simdlen": pick_vec_isa().bit_width()}]


@pytest.mark.slow
def test_under_inductor(seen: Seen) -> None:
    initialize(inner_backend="inductor", fuse_linear_cross_entropy="always", activation_memory_budget=0.3)
    for make, batch, _ in MODELS.values():
        torch._dynamo.reset()
        compare(make(), batch()).check()
    assert not any(map(squares, seen.graphs))
