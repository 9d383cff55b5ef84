"""What the masks of transformers become, by what it calls them with: the version installed here, and another one.

Another version runs in an interpreter of its own, which the variable ``AUTOSP_TEST_PYTHON`` names: one with torch and
the transformers to try.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

LENGTH = 4096
TESTS = Path(__file__).parent
INTERPRETER = "AUTOSP_TEST_PYTHON"


def _ones() -> torch.Tensor:
    return torch.ones(2, LENGTH, dtype=torch.long)


def _padded() -> torch.Tensor:
    mask = _ones()
    mask[:, -1000:] = 0
    return mask


def _packed() -> torch.Tensor:
    return (torch.arange(LENGTH) % 1024).unsqueeze(0)


# By name: the model, rows, what it is called with, and what its attention must come to.
CASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "cache on": ("llama", 2, {}, "causal"),
    "cache off": ("llama", 2, {"use_cache": False}, "causal"),
    "one row, cache off": ("llama", 1, {"use_cache": False}, "causal"),
    "a mask, nothing hidden": ("llama", 2, {"attention_mask": _ones}, "program"),
    "padding": ("llama", 2, {"attention_mask": _padded}, "program"),
    "packed": ("llama", 1, {"position_ids": _packed, "use_cache": False}, "program"),
    "window": ("mistral", 2, {"use_cache": False}, "bounds"),
    "window and padding": ("mistral", 2, {"attention_mask": _padded}, "program"),
}


class _Compiled(Exception):
    """Ends a compilation once its graph has been looked at."""


def _kind(node: Any) -> str:
    """What one attention of a local program has in the place of a mask."""
    arguments = [a.name for a in node.target._schema.arguments]
    given = {**dict(zip(arguments, node.args, strict=False)), **node.kwargs}
    if "block_attention" not in str(node.target):
        return "causal" if given.get("is_causal") and given.get("attn_mask") is None else "exact mask"
    return "program" if given["program"] else "bounds" if given["bounds"][0] >= 0 else "nothing"


def proven(name: str) -> dict[str, Any]:
    """What the attention of a case comes to on one of two ranks, and the largest tensor of its program."""
    import pool
    import zoo

    import autosp
    from autosp import backend, mesh

    model_name, rows, more, _ = CASES[name]
    found: dict[str, Any] = {"kinds": [], "largest": 0}

    def inspect(gm: Any, examples: list[Any]) -> Any:
        work, _ = backend._partition(gm, examples, mesh.select(None))
        for node in work.graph.graph.nodes:
            values = node.meta.get("val")
            for value in values if isinstance(values, (list, tuple)) else [values]:
                if isinstance(value, torch.Tensor):
                    found["largest"] = max(found["largest"], int(value.numel()))
            if "attention" in str(node.target) and "all" not in str(node.target).split(".")[0]:
                found["kinds"].append(_kind(node))
        raise _Compiled

    with pool.fake_group(2):
        autosp.initialize({"autosp": {"attention": "ulysses"}})
        ids = torch.ones(rows, LENGTH, dtype=torch.long)
        model = zoo.build(model_name, num_hidden_layers=1, max_position_embeddings=LENGTH)
        batch = {"input_ids": ids, "labels": ids.clone()}
        batch.update({key: value() if callable(value) else value for key, value in more.items()})
        torch._dynamo.reset()
        with pytest.raises(Exception, match="_Compiled"):
            torch.compile(model, backend=inspect, dynamic=False)(**batch)
    return found


def check(name: str, found: dict[str, Any]) -> None:
    *_, expected = CASES[name]
    assert found["kinds"] == [expected], (name, found)
    # Logits of a rank's tokens are the largest that a step needs.
    assert found["largest"] <= 2 * LENGTH * 128, (name, found)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("cache off", "packed") else pytest.mark.slow) for n in CASES]
)
def test_masks_are_proven(name: str) -> None:
    check(name, proven(name))


@pytest.mark.slow
def test_masks_are_proven_with_another_transformers() -> None:
    python = os.environ.get(INTERPRETER)
    if not python:
        pytest.skip(f"{INTERPRETER} names no interpreter with another transformers")
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([python, __file__], env=environment, capture_output=True, text=True, timeout=340)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["transformers"] != _version(), "the interpreter has the version that is installed here"
    for name, found in told["cases"].items():
        check(name, found)
    assert set(told["cases"]) == set(CASES)


def _version() -> str:
    import transformers

    return transformers.__version__


if __name__ == "__main__":
    print(json.dumps({"transformers": _version(), "cases": {name: proven(name) for name in CASES}}))
    sys.exit(0)
