"""AutoSPConfig: what the JSON means, and one test for every refusal, warning and note."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

from autosp.config import OPTION_NAMES, AutoSPConfig
from autosp.errors import ConfigError


def sizes(tree: dict[str, Any], world_size: int) -> tuple[int | None, int | None, int]:
    config = AutoSPConfig.from_json(tree, world_size)
    return config.data_parallel_size, config.sequence_parallel_size, config.tensor_parallel_size


@pytest.mark.parametrize(
    ("tree", "world_size", "expected"),
    [
        ({}, 4, (1, 4, 1)),
        ({"sequence_parallel_size": 2}, 4, (2, 2, 1)),
        ({"data_parallel_size": 2}, 4, (2, 2, 1)),
        ({"data_parallel_size": 1, "sequence_parallel_size": 3}, 3, (1, 3, 1)),
        ({"mesh_param": [2, 4]}, 8, (2, 4, 1)),
        ({"mesh_param": [2, 2], "sequence_parallel_size": 2, "data_parallel_size": 2}, 4, (2, 2, 1)),
        ({"tensor_parallel": {"autotp_size": 2}}, 8, (1, 4, 2)),
        ({"tensor_parallel": {"autotp_size": 0}}, 2, (1, 2, 1)),
        ({"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}, 8, (2, 2, 2)),
        ({"sequence_parallel_size": 1}, 1, (1, 1, 1)),
    ],
)
def test_sizes_cover_the_world(tree: dict[str, Any], world_size: int, expected: tuple[int, int, int]) -> None:
    assert sizes(tree, world_size) == expected


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"sequence_parallel_size": 3}, r"sequence_parallel_size 3.*do not cover a world of 4.*one of \[1, 2, 4\]"),
        ({"sequence_parallel_size": 8}, "do not cover a world of 4.*nproc-per-node=8"),
        ({"sequence_parallel_size": 2, "data_parallel_size": 1}, "do not cover a world of 4"),
        ({"mesh_param": [1, 2]}, "do not cover a world of 4"),
        ({"tensor_parallel": {"autotp_size": 3}}, "autotp_size 3 do not cover a world of 4"),
        (
            {"sequence_parallel_size": 2, "mesh_param": [1, 4]},
            "sequence_parallel_size is given twice: 2.*4 by",
        ),
        ({"data_parallel_size": 2, "mesh_param": [1, 4]}, "data_parallel_size is given twice"),
        ({"mesh_param": [4]}, r"mesh_param is \[4\]; a list \[data_parallel_size, sequence_parallel_size\]"),
        ({"mesh_param": [2, "2"]}, "mesh_param is"),
        ({"mesh_param": [True, 4]}, "mesh_param is"),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size is 0: input should be greater than or equal to 1"),
        ({"sequence_parallel_size": -2}, "sequence_parallel_size is -2"),
        ({"sequence_parallel_size": "2"}, "sequence_parallel_size is '2': input should be a valid integer"),
        ({"sequence_parallel_size": True}, "sequence_parallel_size is True"),
        ({"sequence_parallel_size": 2.0}, "sequence_parallel_size is 2.0"),
        ({"autosp": 3}, "autosp is 3; a JSON object"),
        ({"compile": ["autosp"]}, "compile is .*; a JSON object"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2; a JSON object"),
        ({"compile": {"passes": "autosp"}}, "compile.passes is 'autosp'; a list of 'z1', 'z3', 'autosp'"),
        ({"compile": {"passes": ["autosp", "z9"]}}, "compile.passes is"),
        ({"compile": {"deepcompile": 1}}, "deepcompile is 1: input should be a valid boolean"),
        ({"tensor_parallel": {"vocab_parallel_ce_backend": "x"}}, "allowed: 'torch', 'liger', 'fused_linear'"),
        ({"tensor_parallel": {"vocab_parallel_lm_head": "yes"}}, "vocab_parallel_lm_head is 'yes'"),
        ({"tensor_parallel": {"vocab_parallel_embedding": 1}}, "vocab_parallel_embedding is 1"),
        (
            {"autosp": {"atention": "auto"}},
            "unknown 'atention' in the \"autosp\" section; atention \\(did you mean attention\\?\\); valid settings: ",
        ),
        ({"autosp": {"step_memory_gib": float("inf")}}, "step_memory_gib is inf: input should be a finite number"),
        (
            {"autosp": {"attention": "flash"}},
            "attention is 'flash'; allowed: 'auto', 'allgather_kv', 'hybrid', 'ring', 'ulysses'$",
        ),
        ({"autosp": {"gradient_reduction": "mean"}}, "allowed: 'graph', 'engine_mean', 'engine_sum'"),
        ({"autosp": {"outputs": "gathered"}}, "allowed: 'dtensor', 'full', 'local'"),
        ({"autosp": {"unsupported": "ignore"}}, "allowed: 'error', 'gather'"),
        ({"autosp": {"inner_backend": "aot"}}, "allowed: 'inductor', 'aot_eager', 'eager'"),
        ({"autosp": {"verify": "never"}}, "allowed: 'inputs', 'compile'"),
        ({"autosp": {"verify_timeout": 0}}, "verify_timeout is 0: input should be greater than 0"),
        ({"autosp": {"verify_timeout": "1"}}, "verify_timeout is '1'"),
        ({"autosp": {"fuse_linear_cross_entropy": True}}, "allowed: 'auto', 'always', 'never'"),
    ],
)
def test_refusals(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoSPConfig.from_json(tree, 4)


@pytest.mark.parametrize("value", ["auto", "ulysses", "allgather_kv", "ring", "hybrid"])
def test_every_attention_strategy_is_a_setting(value: str) -> None:
    assert AutoSPConfig.from_json({"autosp": {"attention": value}}, 2).attention == value


def test_every_bad_setting_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        AutoSPConfig.from_json({"autosp": {"outputs": "x", "verify": "y"}}, 2)
    assert len(str(caught.value).splitlines()) == 2


def test_a_file_and_a_dict_mean_the_same(tmp_path: Path) -> None:
    tree = {"sequence_parallel_size": 2, "autosp": {"outputs": "full", "verify_timeout": 5}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(tree))
    config = AutoSPConfig.from_json(path, 4)
    assert config == AutoSPConfig.from_json(tree, 4) == AutoSPConfig.from_json(str(path), 4)
    assert (config.outputs, config.verify_timeout, config.attention) == ("full", 5.0, "auto")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "holds a list; a JSON object is expected"),
        ('{"autosp": {}, "autosp": {}}', r"duplicate keys \['autosp'\]"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        AutoSPConfig.from_json(path, 1)


def test_a_missing_file_and_a_wrong_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config .*No such file"):
        AutoSPConfig.from_json(tmp_path / "none.json", 1)
    with pytest.raises(ConfigError, match="a path to a JSON file, a dict or an AutoSPConfig, not int"):
        AutoSPConfig.from_json(3, 1)  # type: ignore[arg-type]


def test_constructor_is_keyword_only_frozen_and_refuses_unknown_names() -> None:
    with pytest.raises(TypeError):
        AutoSPConfig(2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="unknown setting 'ring'; valid settings: sequence_parallel_size, "):
        AutoSPConfig(ring=1)
    config = AutoSPConfig(outputs="local")
    with pytest.raises(ValueError, match="frozen"):
        config.outputs = "full"  # type: ignore[misc]


def test_every_field_has_a_default_and_a_docstring() -> None:
    for name, field in AutoSPConfig.model_fields.items():
        assert not field.is_required(), name
        assert field.description and len(field.description) > 20, name
    assert set(OPTION_NAMES) <= set(AutoSPConfig.model_fields)


def test_options_are_laid_over_and_checked_alike() -> None:
    config = AutoSPConfig.from_json({"sequence_parallel_size": 2, "autosp": {"outputs": "full"}}, 4)
    changed = config.with_options({"inner_backend": "eager"})
    assert (changed.inner_backend, changed.outputs, changed.data_parallel_size) == ("eager", "full", 2)
    assert config.inner_backend == "inductor"
    assert config.with_options(None) is config
    with pytest.raises(ConfigError, match=r"unknown 'sequence_parallel_size' in torch.compile\(options=...\)"):
        config.with_options({"sequence_parallel_size": 4})
    with pytest.raises(ConfigError, match="outputs is 'all'; allowed"):
        config.with_options({"outputs": "all"})


def test_deepspeed_compile_section() -> None:
    def requested(section: dict[str, Any]) -> bool:
        return AutoSPConfig.from_json({"compile": section}, 1).requests_autosp

    assert requested({"deepcompile": True, "passes": ["z1", "autosp"], "offload_activation": False})
    assert not requested({"deepcompile": True, "passes": ["z1"]})
    assert not requested({"deepcompile": True})
    assert not requested({"deepcompile": False, "passes": None})


def test_vocabulary_settings_keep_their_deepspeed_names() -> None:
    section = {"autotp_size": 2, "vocab_parallel_lm_head": True, "vocab_parallel_ce_backend": "liger"}
    config = AutoSPConfig.from_json({"tensor_parallel": {**section, "vocab_parallel_embedding": True}}, 2)
    assert config.vocab_parallel_lm_head and config.vocab_parallel_embedding
    assert (config.tensor_parallel_size, config.vocab_parallel_ce_backend) == (2, "liger")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"sequence_parallel_size": 1, "autosp": {"outputs": "full", "verify": "compile"}},
            "outputs, verify: no effect",
        ),
        (
            {"sequence_parallel_size": 1, "autosp": {"token_tiles": 8, "activation_memory_budget": 0.5}},
            "^token_tiles: no effect",
        ),
        (
            {"tensor_parallel": {"vocab_parallel_lm_head": True}},
            "vocab_parallel_lm_head has no effect.*is 1",
        ),
        (
            {"autosp": {"inner_backend": "eager", "token_tiles": 4}},
            'token_tiles: no less memory with inner_backend "eager"',
        ),
        ({"autosp": {"linear_cross_entropy_memory": "lean"}}, 'no effect: fuse_linear_cross_entropy is "never"'),
        ({"tensor_parallel": {"vocab_parallel_ce_backend": "liger"}}, "vocab_parallel_ce_backend: no effect without"),
        ({"tensor_parallel": {"vocab_parallel_embedding": True}}, "vocab_parallel_embedding: no effect without"),
        ({"compile": {"passes": ["autosp"]}}, "compile.passes has no effect in a DeepSpeed engine"),
    ],
)
def test_a_setting_without_effect_warns(tree: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        AutoSPConfig.from_json(tree, 2)


def test_an_ordinary_config_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoSPConfig.from_json({"sequence_parallel_size": 2, "autosp": {"outputs": "full"}}, 2)
        AutoSPConfig.from_json({"sequence_parallel_size": 1, "autosp": {"inner_backend": "eager"}}, 1)
        memory = {"activation_memory_budget": "auto", "step_memory_gib": 1.0, "activation_offloading": "auto"}
        AutoSPConfig.from_json(
            {"sequence_parallel_size": 1, "autosp": {**memory, "checkpointing_keeps": "attention"}}, 1
        )
        head = {"autotp_size": 2, "vocab_parallel_lm_head": True}
        tree = {"sequence_parallel_size": 1, "autosp": {"overlap_communication": False}, "tensor_parallel": head}
        AutoSPConfig.from_json(tree, 2)


def test_deepspeed_keys_are_ignored_with_one_note(caplog: pytest.LogCaptureFixture) -> None:
    tree = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    with caplog.at_level(logging.INFO, "autosp.config"), warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoSPConfig.from_json(tree, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "DeepSpeed settings that autosp does not use: bf16, train_batch_size, zero_optimization"
    ]


def test_unknown_top_level_keys_are_ignored_with_one_warning() -> None:
    with pytest.warns(UserWarning) as caught:
        AutoSPConfig.from_json({"sequence_paralel_size": 2, "zzz": 1}, 2)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "sequence_paralel_size, zzz" in message
    assert "did you mean sequence_parallel_size?" in message
