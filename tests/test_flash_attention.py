"""``flash_attention_2`` and ``flash_attention_3`` of transformers by name, over stand-ins of their packages."""

from __future__ import annotations

import functools
from typing import Any

import flash_stand_in
import parity
import pytest
import torch
import zoo
from pool import RankPool

slow = pytest.mark.slow


def packed(length: int, rows: int = 1) -> dict[str, Any]:
    """Two documents in one row, as a padding-free collator gives them."""
    starts = torch.tensor([0, 7, length], dtype=torch.int32)
    longest = max(7, length - 7)
    places = torch.cat([torch.arange(7), torch.arange(length - 7)]).unsqueeze(0)
    return {
        **zoo.batch(length, rows=rows), "position_ids": places, "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts.clone(), "max_length_q": longest, "max_length_k": longest, "use_cache": False,
    }  # fmt: skip


def run_flash(
    rank_info: Any, name: str, version: int, batches: list[dict[str, Any]], changes: dict[str, Any], inner: str
) -> list[parity.Result]:
    changes = {"num_hidden_layers": 1, **changes, "attn_implementation": f"flash_attention_{version}"}
    with flash_stand_in.installed():
        config = {"autosp": {"inner_backend": inner}}
        return parity.run_model(rank_info, functools.partial(zoo.build, name, **changes), batches, config=config)


CASES = {
    "rows": ("llama", [zoo.batch(16), zoo.batch(17)], {}),
    "window": ("mistral", [zoo.batch(17)], {}),
    "heads that are padded": ("llama", [zoo.batch(16)], {"head_dim": 4}),
    "packed": ("llama", [packed(17)], {}),
    "packed, two lengths and layers": ("llama", [packed(16), packed(17)], {"num_hidden_layers": 2}),
}


@pytest.mark.parametrize(
    ("case", "version"),
    [
        pytest.param(case, version, marks=() if (case, version) == ("packed", 2) else slow)
        for case in CASES
        for version in (2, 3)
    ],
)
def test_flash_attention_by_name(ranks: RankPool, inner: str, case: str, version: int):
    name, batches, changes = CASES[case]
    for results in ranks.run(run_flash, name, version, batches, changes, inner, timeout=300):
        for result in results:
            result.check()
