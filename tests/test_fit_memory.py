"""``activation_memory_budget: "auto"``: what is chosen for how much memory, alike on all ranks, and exact."""

from __future__ import annotations

import functools
import logging
import pickle
import re
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import zoo
from pool import RankPool

import autosp
from autosp.errors import ConfigError
from autosp.fit_memory import FitMemory

CHOICE = re.compile(r"auto: ([0-9.]+), ([0-9.e-]+) of")


class Choices(logging.Handler):
    """What "auto" logs: each choice as (budget, bytes), then the ways that did not fit."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[tuple[float, float]] = []
        self.too_large = 0
        self.warned = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if match := CHOICE.search(text):
            self.found.append((float(match[1]), float(match[2]) * 2**30))
        self.too_large += "trying the next way" in text
        self.warned += "may run out of memory" in text

    def __enter__(self) -> Choices:
        log = logging.getLogger("autosp")
        self.level_before = log.level
        log.setLevel(logging.INFO)
        log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        log = logging.getLogger("autosp")
        log.setLevel(self.level_before)
        log.removeHandler(self)


def llama() -> torch.nn.Module:
    return zoo.build("llama", num_hidden_layers=1)


def chosen(mib: float, **settings: Any) -> Choices:
    """Compile a step that may take so many MiB."""
    from autosp.backend import autosp_backend

    torch._dynamo.reset()
    section = {"inner_backend": "aot_eager", "activation_memory_budget": "auto", "step_memory_gib": mib / 1024}
    autosp.initialize({"autosp": {**section, **settings}})
    with Choices() as choices:
        torch.compile(llama(), backend=autosp_backend)(**autosp.prepare_batch(zoo.batch(2048))).loss.backward()
    return choices


def test_the_largest_budget_that_fits_is_taken(
    fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ranks(2)
    ((full, most),) = chosen(1e6).found
    assert full == 1.0
    ((tight, less),) = chosen(0.98 * most / 2**20).found
    assert tight < 1.0 and less < 0.98 * most
    # Where nothing fits all are tried: three of the eight will do.
    monkeypatch.setattr("autosp.fit_memory.BUDGETS", (1.0, tight, 0.0))
    nothing = chosen(0.01, token_tiles="auto")
    assert nothing.too_large == 1 and nothing.warned == 1  # without tiles; then with, which is taken though too large
    assert nothing.found
    # of the budgets of one way, none of which fits, it is the one that needs least
    ((_, least),) = chosen(0.01).found
    assert least <= less


def exact_body(rank_info: Any, mib: float) -> tuple[list[tuple[float, float]], int, list[parity.Result]]:
    section = {"activation_memory_budget": "auto", "step_memory_gib": mib / 1024, "token_tiles": "auto"}
    config = {"autosp": {**section, "inner_backend": "aot_eager"}}
    with Choices() as choices:
        results = parity.run_model(rank_info, uneven, [zoo.batch(17)], config=config)
    return choices.found, choices.too_large, results


def uneven() -> torch.nn.Module:
    """Three heads: one rank attends with two of them and needs more memory than the other."""
    return zoo.build("llama", num_hidden_layers=1, hidden_size=48, num_attention_heads=3, num_key_value_heads=3)


@pytest.mark.slow
def test_exact_and_alike_on_ranks_that_need_different_amounts(ranks: RankPool) -> None:
    outcomes = ranks.run(exact_body, 0.001, timeout=300)
    for found, too_large, results in outcomes:
        assert found == outcomes[0][0] and found and too_large >= 1
        for result in results:
            result.check()


@pytest.mark.parametrize("budget", ["auto", 0.5])
def test_a_choice_is_not_taken_from_the_cache_of_joint_graphs(fake_ranks: Callable[..., None], budget: Any) -> None:
    """AOTAutograd's key does not hold the partitioner, and a rank that found a program would not choose with others."""
    from autosp.backend import compile_for_rank

    fake_ranks(2)
    state = autosp.initialize({"autosp": {"activation_memory_budget": budget, "step_memory_gib": 1.0}})
    found = []

    def compiler(graph: torch.fx.GraphModule, examples: Any, config_patches: Any = None) -> Any:
        found.append((torch._functorch.config.enable_autograd_cache, "custom_partitioner_fn" in config_patches))
        return graph

    before = torch._functorch.config.enable_autograd_cache
    backend = functools.partial(compile_for_rank, state=state, compiler=compiler)
    torch.compile(llama(), backend=backend)(**autosp.prepare_batch(zoo.batch(16)))
    assert found == [(False, True) if budget == "auto" else (before, False)]


@pytest.mark.slow
def test_under_inductor(ranks: RankPool) -> None:
    section = {"activation_memory_budget": "auto", "step_memory_gib": 1e-5, "token_tiles": "auto"}
    for results in ranks.run(parity.run_model, llama, [zoo.batch(16)], config={"autosp": section}, timeout=500):
        for result in results:
            result.check()


def test_the_figure_is_that_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same partition, read with numbers here and with symbols there."""
    from autosp.fit_memory import peak_bytes
    from autosp.plan import trace as trace_module
    from autosp.plan.schedule import scheduled_program
    from autosp.plan.walk import profile

    def make() -> tuple[torch.nn.Module, Callable[[int], dict[str, torch.Tensor]]]:
        return llama(), lambda length: zoo.batch(length)

    graphs: list[torch.fx.GraphModule] = []
    found = []

    def read(gm: torch.fx.GraphModule, config: Any) -> Any:
        graphs.append(gm)
        if len(graphs) == 2:
            found.append(peak_bytes(*graphs, config=config))
        return scheduled_program(gm, config)

    monkeypatch.setattr(trace_module, "scheduled_program", read)
    trace = trace_module.trace_step(make, length=2048, ranks=2, dtype=torch.float32)
    planned = max(moment.total for moment in profile(trace, 2048).moments.values())
    assert found == [planned] and planned > 0


def test_a_device_without_memory_of_its_own_is_refused(fake_ranks: Callable[..., None]) -> None:
    from autosp.backend import autosp_backend

    fake_ranks(2)
    autosp.initialize({"autosp": {"inner_backend": "aot_eager", "activation_memory_budget": "auto"}})
    with pytest.raises(Exception, match="asks a CUDA device for its memory") as caught:
        torch.compile(llama(), backend=autosp_backend)(**autosp.prepare_batch(zoo.batch(16)))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), ConfigError)


def test_what_auto_alone_reads_has_no_effect_without_it() -> None:
    with pytest.warns(UserWarning, match='token_tiles: no effect unless activation_memory_budget is "auto"'):
        autosp.AutoSPConfig(sequence_parallel_size=2, token_tiles="auto").for_world(2)


@pytest.mark.parametrize("value", [1.5, -0.1, "most", True, float("nan")])
def test_wrong_budgets(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^activation_memory_budget is \S+: input should be .*, or 'auto'$"):
        autosp.AutoSPConfig(activation_memory_budget=value)


def test_a_copy_that_a_cache_made_can_be_printed() -> None:
    """Inductor prints the settings that its cache is keyed by, from pickled copies."""
    fit = FitMemory(2.0**30, lambda needed: needed, must_fit=False)
    assert str(pickle.loads(pickle.dumps(fit))) == str(fit) == "no budget chosen"
    fit.budget, fit.needed = 0.5, 2.0**29
    assert str(fit) == "0.5, 0.5 of 1 GiB"
