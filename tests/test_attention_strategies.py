"""Every way in which a group shares attention, under every kind of mask: exact against one process."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import masked_toys
import parity
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st
from pool import RankPool

import autosp
from autosp.layout.attention.choose import attention_strategy, possible
from autosp.layout.attention.forms import BlockForm, SdpaForm
from autosp.layout.axis import Axis
from autosp.layout.call import OpCall, Refusal, Value
from autosp.layout.placement import shard_of_dim

slow = pytest.mark.slow
MASKS = ["is_causal", *masked_toys.MASKS]


def check(
    ranks: RankPool,
    mask: str,
    strategy: str,
    world: int,
    lengths: tuple[int, ...] = (16, 17),
    inner: str = "aot_eager",
    **model: Any,
) -> None:
    batches = [masked_toys.batch(n, packed=mask == "document") for n in lengths]
    build = functools.partial(masked_toys.build, mask, **model)
    config = {"autosp": {"inner_backend": inner, "attention": strategy}}
    for results in ranks.run(parity.run_model, build, batches, config=config, world_size=world, timeout=300):
        for result in results:
            result.check()


@pytest.mark.parametrize(
    ("mask", "strategy", "world"),
    [
        ("document", "ulysses", 2),
        ("learned_alibi", "allgather_kv", 3),
        *(
            pytest.param(mask, strategy, 4 if strategy == "hybrid" else 3, marks=slow)
            for strategy in ("ulysses", "allgather_kv", "ring", "hybrid")
            for mask in MASKS
        ),
    ],
)
def test_masks(ranks: RankPool, inner: str, mask: str, strategy: str, world: int):
    check(ranks, mask, strategy, world, lengths=(17,) if world == 4 else (16, 17), inner=inner)


@pytest.mark.parametrize("mask", parity.mostly_slow(MASKS, ["padding"]))
def test_masks_of_attention_that_is_written_out(ranks: RankPool, mask: str):
    """Padding runs over tokens too, along the keys: scores that it hides go back to their queries."""
    check(ranks, mask, "auto", 3, lengths=(17,), form="eager")


@pytest.mark.parametrize("strategy", parity.mostly_slow(["ulysses", "allgather_kv", "ring", "hybrid"], ["ring"]))
def test_rows_that_see_nothing(ranks: RankPool, inner: str, strategy: str):
    world = 4 if strategy == "hybrid" else 3
    check(ranks, "left_padding", strategy, world, lengths=(17,), inner=inner)


NONE_DROPPED = 1e-8
"""A probability that is less than a step of the draws: one process can be compared."""


@pytest.mark.parametrize(
    ("mask", "dropout"),
    [
        ("left_padding", NONE_DROPPED),
        *(pytest.param(mask, NONE_DROPPED, marks=slow) for mask in MASKS),
        pytest.param("is_causal", 1.0, marks=slow),
    ],
)
def test_masks_under_dropout(ranks: RankPool, inner: str, mask: str, dropout: float):
    check(ranks, mask, "auto", 3, lengths=(17,), inner=inner, value_size=6, dropout=dropout)


@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv", "ring", pytest.param("hybrid", marks=slow)])
@slow
def test_values_of_another_size_and_few_heads(ranks: RankPool, strategy: str):
    world = 4 if strategy == "hybrid" else 3
    check(ranks, "window", strategy, world, heads=2, kv_heads=1, value_size=6)


@slow
def test_more_ranks_than_heads_share_the_work(ranks: RankPool):
    check(ranks, "is_causal", "auto", 4, heads=2, kv_heads=1)


@pytest.mark.parametrize("strategy", ["ring", "allgather_kv"])
@slow
def test_half_precision_is_merged_in_single(ranks: RankPool, strategy: str):
    build = functools.partial(masked_toys.build, "window")
    for results in ranks.run(run_half, build, strategy, timeout=300):
        results.check(2e-2)


def run_half(rank_info: Any, build: Any, strategy: str) -> parity.Result:
    config = {"autosp": {"inner_backend": "aot_eager", "attention": strategy}}
    return parity.run_model(rank_info, lambda: coarse(build().bfloat16()), [masked_toys.batch(17)], config=config)[0]


def coarse(model: masked_toys.MaskedToy) -> masked_toys.MaskedToy:
    """Without the gradient of the key bias: softmax does not feel it, so that it is nothing but rounding, and in half
    precision one process is as far from the true zero as a group is.
    """
    model.toy.attention.k.bias.requires_grad_(False)
    return model


def run_autocast(rank_info: Any, mask: str, strategy: str) -> list[parity.Result]:
    config = {"autosp": {"inner_backend": "aot_eager", "attention": strategy}}
    build = lambda: coarse(masked_toys.build(mask).float())  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return parity.run_model(rank_info, build, [masked_toys.batch(17, packed=True)], config=config)


@pytest.mark.parametrize(("mask", "strategy"), [("document", "ulysses"), ("is_causal", "ring")])
@slow
def test_autocast(ranks: RankPool, mask: str, strategy: str):
    for results in ranks.run(run_autocast, mask, strategy, timeout=300):
        for result in results:
            result.check(2e-2)


@slow
def test_inductor_at_two_uneven_lengths(ranks: RankPool):
    build = functools.partial(masked_toys.build, "document")
    batches = [masked_toys.batch(n, packed=True) for n in (17, 21)]
    config = {"autosp": {"inner_backend": "inductor", "attention": "ring"}}
    for results in ranks.run(parity.run_model, build, batches, config=config, timeout=340):
        for result in results:
            result.check()


CASES = st.fixed_dictionaries(
    {
        "mask": st.sampled_from(MASKS),
        "heads": st.sampled_from([(4, 4), (4, 2), (4, 1), (3, 1), (6, 3), (5, 5), (7, 1)]),
        "world": st.sampled_from([2, 3, 4]),
        "strategy": st.sampled_from(["auto", "ulysses", "allgather_kv", "ring", "hybrid"]),
        "form": st.sampled_from(["sdpa", "eager"]),
        "length": st.integers(3, 40),
    }
)
SWEEP = {
    "deadline": None,
    "phases": [Phase.explicit, Phase.generate],
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


def one_case(ranks: RankPool, case: dict[str, Any]) -> None:
    heads, kv_heads = case["heads"]
    model = {"heads": heads, "kv_heads": kv_heads, "form": case["form"]}
    # A group of a prime number of ranks has no inner groups for hybrid.
    world = 4 if case["strategy"] == "hybrid" else case["world"]
    check(ranks, case["mask"], case["strategy"], world, (case["length"],), **model)


HYBRID = {"mask": "window", "heads": (7, 1), "world": 4, "strategy": "hybrid", "form": "sdpa", "length": 13}


@settings(max_examples=2, derandomize=True, **SWEEP)
@given(case=CASES)
@example(case=HYBRID)
def test_sweep(ranks: RankPool, case: dict[str, Any]):
    one_case(ranks, case)


@slow
@pytest.mark.parametrize("part", range(6))
def test_long_sweep(ranks: RankPool, part: int):
    @seed(part)
    @settings(max_examples=5, database=None, **SWEEP)
    @given(case=CASES)
    def run(case: dict[str, Any]) -> None:
        one_case(ranks, case)

    run()


TOY = "fetch_everything"


def run_toy_strategy(rank_info: Any) -> tuple[str, int, list[parity.Result]]:
    import autosp
    from autosp.layout.attention.strategies import STRATEGIES

    config = {"autosp": {"inner_backend": "aot_eager", "attention": TOY}}
    build = functools.partial(masked_toys.build, "window", heads=3, kv_heads=1)
    results = parity.run_model(rank_info, build, [masked_toys.batch(17)], config=config)
    return str(autosp.__file__), len(STRATEGIES[TOY].USED), results


def test_a_strategy_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy of the package with one more file in it, in processes of its own."""
    shutil.copytree(Path(autosp.__file__).parent, tmp_path / "autosp")
    strategies = tmp_path / "autosp" / "layout" / "attention" / "strategies"
    text = (strategies / "allgather_kv.py").read_text()
    used = text.replace("def attend(", "USED.append(form)\n\n    def attend(").replace(
        "def refusal", "USED = []\n\n\ndef refusal"
    )
    (strategies / f"{TOY}.py").write_text(used)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)  # what a process is started in comes first
    with RankPool() as fresh:
        for package, times, results in fresh.run(run_toy_strategy, timeout=200):
            assert package.startswith(str(tmp_path)) and times > 0
            for result in results:
                result.check()


class _Node:
    name = "attention"
    users = ()


def form(
    ranks: int, heads: int, key_heads: int, *, causal: bool = True, attention: str = "auto", dropout: float = 0.0
) -> SdpaForm:
    """An attention call on 64 tokens, as a rule sees it."""

    def value(count: int) -> Value:
        val = torch.empty(1, count, 64, 16, device="meta")
        return Value(_Node(), val, shard_of_dim(val.shape, 2))  # type: ignore[arg-type]

    q, k, v = value(heads), value(key_heads), value(key_heads)
    args = {"query": q, "key": k, "value": v, "is_causal": causal, "dropout_p": dropout, "scale": None}
    axis = Axis("sp", ranks, 0, "group", attention=attention)
    return SdpaForm(OpCall(_Node(), None, args, q.val, axis), q, k, v)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "heads", "key_heads", "causal", "chosen"),
    [
        (2, 8, 2, True, "ulysses"),  # causal rows are uneven work, heads are not
        (4, 8, 8, True, "ulysses"),
        (8, 4, 4, True, "ring"),  # half of the ranks would idle, and in zigzag order all have the same work
        (4, 2, 1, True, "ring"),
        (3, 1, 1, True, "ring"),
        (4, 2, 2, False, "hybrid"),  # without a mask contiguous rows are even work, and heads save traffic
        (4, 8, 1, False, "allgather_kv"),  # all ranks have equal work either way, and one key head is little to move
    ],
)
def test_auto_chooses_by_work_then_traffic_and_says_why(
    ranks: int, heads: int, key_heads: int, causal: bool, chosen: str
):
    call = form(ranks, heads, key_heads, causal=causal)
    costs = possible(call)
    best = min(costs, key=lambda name: (round(costs[name].share, 6), costs[name].moved, costs[name].held))
    assert best == chosen, costs
    note = attention_strategy(call).note
    assert "auto: " in note and "of the scores on the busiest rank" in note and "bytes moved" in note


def test_what_cannot_be_served_is_refused_with_what_can():
    with pytest.raises(Refusal, match='attention: "hybrid" cannot serve this call: a group of 3 ranks has no inner'):
        attention_strategy(form(3, 4, 2, attention="hybrid"))
    with pytest.raises(Refusal, match="dropout needs the probabilities of whole rows") as caught:
        attention_strategy(form(4, 4, 2, attention="ring", dropout=0.1))
    assert '"ulysses"' in caught.value.remedy and "ring" not in caught.value.remedy


def test_a_program_may_hide_later_keys():
    assert BlockForm.may_be_causal.fget(None)  # type: ignore[attr-defined]
    assert not form(2, 4, 4, causal=False).may_be_causal
