"""Settings of the inner compiler: what a memory budget recomputes, and how sums of gradients are joined."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch._inductor.config as inductor_config
import toys
import zoo
from pool import RankInfo, RankPool
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autosp
from autosp.inner import compile_local, name_marked
from autosp.product_order import KeepProductsInOrder


class Operators(TorchDispatchMode):
    """Counts operators by name, also those that run with the random state of the forward."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = [arg for arg in args if isinstance(arg, torch._ops.OpOverload)]
        self.found[(inside[0] if inside else func)._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def saved_and_backward(
    budget: float, checkpoint: bool = False, keeps: str = "nothing", fuse: str = "never", inner: str = "aot_eager"
) -> tuple[int, Counter[str]]:
    """Bytes that the forward saves, parameters among them, and the operators of the backward."""
    from autosp.backend import autosp_backend

    torch._dynamo.reset()
    section = {"inner_backend": inner, "activation_memory_budget": budget, "checkpointing_keeps": keeps}
    autosp.initialize({"autosp": {**section, "fuse_linear_cross_entropy": fuse}})
    model = zoo.build("llama", num_hidden_layers=1)
    if checkpoint:
        model.gradient_checkpointing_enable()
    compiled = torch.compile(model.train(), backend=autosp_backend)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch._subclasses.FakeTensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled(**autosp.prepare_batch(zoo.batch(64))).loss
    with Operators() as operators:
        loss.backward()
    return sum(kept.values()), operators.found


def test_a_budget_saves_less_and_never_attends_or_exchanges_again(fake_ranks: Callable[..., None]):
    fake_ranks(2)
    full, plain = saved_and_backward(1.0)
    half, _ = saved_and_backward(0.5)
    least, recomputed = saved_and_backward(0.0)
    assert least < half < full
    assert sum(recomputed.values()) > sum(plain.values())
    assert recomputed["mm"] > plain["mm"], "matrix products are recomputed"
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (plain[attention], recomputed[attention]) == (0, 0)
    for name in ("all_to_all_single", "all_gather_into_tensor", "all_reduce"):
        assert plain[name] == recomputed[name], name


@pytest.mark.parametrize("way", ["keep", "form", "lean"])
def test_a_budget_runs_no_fused_loss_again(way: str, fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    """Its matrix products are those of the whole head, and over a group it has collectives inside."""
    from autosp.custom_ops.linear_loss import plan

    fake_ranks(2)
    monkeypatch.setattr(plan, "choose_way", lambda *_: way)
    _, operators = saved_and_backward(0.0, fuse="always")
    assert operators["linear_stats_backward" if way != "form" else "linear_scale_gradient"] > 0
    assert operators["linear_stats"] == operators["linear_cross_entropy"] == 0


def test_checkpointing_can_keep_what_attention_gives(fake_ranks: Callable[..., None]):
    fake_ranks(2)
    least, again = saved_and_backward(1.0, checkpoint=True)
    more, kept = saved_and_backward(1.0, checkpoint=True, keeps="attention")
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (again[attention], kept[attention]) == (1, 0)
    assert again["mm"] == kept["mm"], "the rest is recomputed as before"
    assert least < more


def keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def keep_products() -> Any:
    return create_selective_checkpoint_contexts(keeps_products)


@pytest.mark.parametrize("selective", [True, False])
def test_selective_checkpointing_is_told_that_all_is_computed_again(
    selective: bool, fake_ranks: Callable[..., None], caplog: pytest.LogCaptureFixture
):
    class Region(toys.Toy):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            more = {"context_fn": keep_products} if selective else {}
            return checkpoint(super().forward, input_ids, labels, use_reentrant=False, **more)

    fake_ranks(2)
    found = backward_of(Region(vocab=zoo.VOCAB), zoo.batch(16))
    assert found["mm"] > 0
    assert sum("context_fn" in record.getMessage() for record in caplog.records) == selective


@pytest.mark.slow
def test_no_program_of_another_checkpointing_comes_from_the_cache(fake_ranks: Callable[..., None]):
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    fake_ranks(2)
    ways = [(False, "nothing"), (True, "nothing"), (True, "attention")]
    with fresh_cache():
        counters.clear()
        full, least, more = (saved_and_backward(1.0, *way, inner="inductor")[0] for way in ways)
        assert least < more < full
        found = counters["aot_autograd"]
        assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (3, 0)
        assert saved_and_backward(1.0, *ways[1], inner="inductor")[0] == least
        assert found["autograd_cache_hit"] == 1, "the same program comes from there"


def test_marks_of_the_partitioner_are_in_the_text_of_a_graph():
    """AOTAutograd's cache reads nothing else. Regions are counted over a process, and the cache is that of all."""

    def text(policy: Any, first: int, second: int) -> str:
        graph = torch.fx.symbolic_trace(lambda x: x.sin().cos())
        for node, region in zip(list(graph.graph.nodes)[1:3], (first, second), strict=True):
            if policy is not None:
                node.meta.update(recompute=policy, ac_graph_id=region)
        name_marked(graph)
        return graph.code

    policies = [None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE]
    texts = {text(policy, *regions) for policy in policies for regions in [(1, 1), (1, 2), (2, 1)]}
    assert len(texts) == 1 + 3 * 2
    assert text(policies[1], 1, 2) == text(policies[1], 5, 9)


def backward_of(model: torch.nn.Module, batch: dict[str, Any], **section: Any) -> Counter[str]:
    """The operators of the backward of a step, for one rank of two."""
    from autosp.backend import autosp_backend

    torch._dynamo.reset()
    autosp.initialize({"autosp": {"inner_backend": "aot_eager", "verify": "compile", **section}})
    loss = torch.compile(model.train(), backend=autosp_backend)(**autosp.prepare_batch(batch)).loss
    with Operators() as operators:
        loss.backward()
    return operators.found


@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_a_budget_draws_no_dropout_mask_again(budget: float, fake_ranks: Callable[..., None]):
    """The seed of a mask weighs nothing, and torch takes the operator that draws it for one that may run again."""
    fake_ranks(2)
    found = backward_of(toys.build(dropout=0.3), toys.batch(512), activation_memory_budget=budget)
    assert found["randint"] == 0 and found["mm"] > 0


def dropped(rank_info: RankInfo) -> list[dict[str, torch.Tensor]]:
    """Gradients of a step with the same seed, without a budget and with the least."""
    found = []
    for section in ({}, {"activation_memory_budget": 0.0}):
        torch._dynamo.reset()
        autosp.initialize({"autosp": {"inner_backend": "aot_eager", **section}})
        model = toys.build(dropout=0.3).train()
        torch.manual_seed(5)
        torch.compile(model, backend="autosp")(**autosp.prepare_batch(toys.batch(256))).loss.backward()
        found.append(parity.gradients(model))
    return found


@pytest.mark.slow
def test_dropout_is_the_same_under_a_budget(ranks: RankPool):
    for plain, least in ranks.run(dropped, timeout=300):
        for name, gradient in plain.items():
            torch.testing.assert_close(least[name], gradient, msg=name)


def test_a_kernel_of_the_user_attends_once_under_a_budget(fake_ranks: Callable[..., None]):
    import kernel_attention
    from test_register_attention import Kernel

    kernel_attention.register()
    fake_ranks(2)
    found = backward_of(Kernel(False), toys.batch(512), activation_memory_budget=0.0)
    assert (found["flash"], found["flash_backward"]) == (0, 1)


@pytest.mark.parametrize(
    ("checkpoint", "section", "again"),
    [
        (False, {"activation_memory_budget": 0.0}, 0),
        (True, {"checkpointing_keeps": "attention"}, 0),
        pytest.param(True, {}, 1, marks=pytest.mark.slow),
    ],
)
def test_flash_attention_by_name_attends_as_often_as_it_is_told(
    checkpoint: bool, section: dict[str, Any], again: int, fake_ranks: Callable[..., None]
):
    """Its operator lies inside a ``torch.autograd.Function``, whose body must know what its node says."""
    import flash_stand_in

    fake_ranks(2)
    with flash_stand_in.installed():
        model = zoo.build("llama", num_hidden_layers=1, attn_implementation="flash_attention_2")
        if checkpoint:
            model.gradient_checkpointing_enable()
        found = backward_of(model, zoo.batch(256), **section)
    assert (found["_flash_attn_forward"], found["_flash_attn_backward"]) == (again, 1)


@pytest.mark.parametrize(
    ("attention", "checkpoint", "said"),
    [("sdpa", False, "attends outside of what is checkpointed"), ("eager", True, "hold no attention in one operator")],
)
def test_keeping_attention_without_effect_is_told(
    attention: str, checkpoint: bool, said: str, fake_ranks: Callable[..., None], caplog: pytest.LogCaptureFixture
):
    fake_ranks(2)
    model = zoo.build("llama", num_hidden_layers=1, attn_implementation=attention)
    if checkpoint:
        model.gradient_checkpointing_enable()
    backward_of(model, zoo.batch(64), checkpointing_keeps="attention")
    assert said in caplog.text


def checkpointed_llama() -> torch.nn.Module:
    model = zoo.build("llama", num_hidden_layers=2).train()
    model.gradient_checkpointing_enable()
    return model


@pytest.mark.slow
def test_exact_where_checkpointing_keeps_attention(ranks: RankPool):
    config = {"autosp": {"inner_backend": "aot_eager", "checkpointing_keeps": "attention", "token_tiles": 2}}
    batches = [zoo.batch(17)]
    for results in ranks.run(parity.run_model, checkpointed_llama, batches, config=config, timeout=300):
        for result in results:
            result.check()


@pytest.mark.parametrize("budget", parity.mostly_slow([0.0, 0.3], []))
def test_exact_under_a_budget(ranks: RankPool, budget: float):
    config = {"autosp": {"inner_backend": "aot_eager", "activation_memory_budget": budget}}
    for results in ranks.run(parity.run_model, zoo_llama, [zoo.batch(16), zoo.batch(17)], config=config, timeout=300):
        for result in results:
            result.check()


def zoo_llama() -> torch.nn.Module:
    return zoo.build("llama", num_hidden_layers=1)


def generated(gpu_like: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Inductor writes for the forward and the backward of a checkpointed Llama."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    from autosp import inner
    from autosp.backend import autosp_backend

    torch._dynamo.reset()
    monkeypatch.setattr(inner, "frees_at_once", lambda examples: gpu_like)
    compiled = torch.compile(checkpointed_llama(), backend=autosp_backend)
    with fresh_cache():
        _, code = run_and_get_code(lambda: compiled(**autosp.prepare_batch(zoo.batch(64))).loss.backward())
    return code


@pytest.mark.slow
def test_on_a_gpu_no_freed_buffer_waits_for_a_later_one(
    fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    """Only an operator's own operand is written over, which is free at that moment."""
    fake_ranks(2)
    autosp.initialize({"autosp": {"verify": "compile"}})
    kept, freed = (generated(gpu_like, monkeypatch) for gpu_like in (False, True))
    assert len(kept) == len(freed) == 2
    frees = [sum(text.count("\n        del buf") for text in code) for code in (kept, freed)]
    assert frees[1] > frees[0] + 20


@pytest.mark.parametrize(("dynamic", "gpu"), [(True, True), (True, False), (False, True)])
def test_freed_buffers_go_back_where_lengths_differ_on_a_gpu(
    dynamic: bool, gpu: bool, fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    """Asked with the inputs that Dynamo really gives: tensors of the example, and each size that varies by itself."""
    from autosp import inner
    from autosp.backend import autosp_backend

    asked: list[dict[str, Any]] = []
    settings = inner._inductor_settings

    def look(config: Any, fit: Any, examples: list[Any]) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            if gpu:
                patch.setattr(torch.Tensor, "is_cuda", True)
            asked.append(settings(config, fit, examples))
        return asked[-1]

    class Stop(Exception):
        """Nothing needs to be compiled."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Stop

    fake_ranks(2)
    torch._dynamo.reset()
    autosp.initialize({"autosp": {"verify": "compile"}})
    monkeypatch.setattr(inner, "_inductor_settings", look)
    monkeypatch.setattr(inner, "lookup_backend", lambda name: stop)
    batch = zoo.batch(64)
    tagged = autosp.prepare_batch(batch) if dynamic else batch
    with pytest.raises(Exception, match="Stop"):
        torch.compile(checkpointed_llama(), backend=autosp_backend, dynamic=None if dynamic else False)(**tagged)
    assert [found.get("allow_buffer_reuse", True) for found in asked] == [not (dynamic and gpu)]


@pytest.mark.parametrize(("tiles", "ordered"), [(4, True), ("auto", False), (1, False)])
def test_products_keep_their_order_where_there_are_parts(tiles: Any, ordered: bool, monkeypatch: pytest.MonkeyPatch):
    """ "auto" that nobody chooses for is one part."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr("autosp.inner.lookup_backend", lambda name: lambda *args, **kwargs: seen.update(kwargs))
    compile_local(torch.fx.GraphModule({}, torch.fx.Graph()), [], autosp.AutoSPConfig(token_tiles=tiles))
    assert isinstance(seen["config_patches"]["post_grad_custom_post_pass"], KeepProductsInOrder) is ordered


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of instruction sets of x86")
@pytest.mark.parametrize(("capability", "width"), [("avx2", 256), ("default", 0)])
def test_programs_of_a_cpu_say_how_wide_their_vectors_are(capability: str, width: int, monkeypatch: pytest.MonkeyPatch):
    """torch's caches tell settings apart, and not the instruction sets that programs were written for."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    seen: dict[str, Any] = {}
    monkeypatch.setattr("autosp.inner.lookup_backend", lambda name: lambda *args, **kwargs: seen.update(kwargs))
    program = torch.fx.GraphModule({}, torch.fx.Graph())
    compile_local(program, [torch.ones(1)], autosp.AutoSPConfig())
    assert seen["config_patches"]["cpp.simdlen"] == width
    compile_local(program, [torch.ones(1, device="meta")], autosp.AutoSPConfig())
    assert "cpp.simdlen" not in seen["config_patches"]
    with inductor_config.patch("cpp.simdlen", 128):
        compile_local(program, [torch.ones(1)], autosp.AutoSPConfig())
    assert "cpp.simdlen" not in seen["config_patches"]
