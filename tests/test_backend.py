"""The backend as torch finds it, without a group, and under each setting of ``verify``."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import parity
import pytest
import torch
import toys
import zoo
from pool import RankInfo, RankPool
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

BY_NAME = """
import sys, torch
assert "autosp" not in sys.modules
model = torch.nn.Linear(4, 3)
x = torch.randn(2, 4)
compiled = torch.compile(model, backend="autosp", options={"inner_backend": "eager"})
assert torch.equal(compiled(x), model(x))
assert "autosp" in sys.modules
print("found")
"""


def test_found_by_name_without_an_import():
    done = subprocess.run([sys.executable, "-c", BY_NAME], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "found", done.stderr


def plain_runs(rank_info: RankInfo, initialized: bool) -> list[bool]:
    """Whether a compiled model gives the plain one's bits; its inputs may be tagged or not."""
    import autosp

    if initialized:
        assert autosp.initialize({"autosp": {"inner_backend": "eager"}}).sp_size == 1
    model = toys.build("pad_slice")
    compiled = torch.compile(model, backend="autosp", options={"inner_backend": "eager"})
    same = []
    for prepare in (dict, autosp.prepare_batch):
        batch = toys.batch(9)
        expected, got = model(**batch), compiled(**prepare({k: v.clone() for k, v in batch.items()}))
        grads = [parity.gradients(model) for loss in (expected.loss, got.loss) if loss.backward() is None]
        same += [torch.equal(expected.loss, got.loss), torch.equal(expected.logits, got.logits)]
        same += [torch.equal(grads[0][name], grads[1][name]) for name in grads[0]]
    return same


@pytest.mark.parametrize("initialized", [True, False], ids=["world of one", "nothing set up"])
def test_without_a_sequence_group_the_plain_model_is_compiled(ranks: RankPool, initialized: bool):
    (same,) = ranks.run(plain_runs, initialized, world_size=1, process_group=initialized, timeout=100)
    assert len(same) > 10
    assert all(same)


def steps_with_other_ids(rank_info: RankInfo, verify: str, first: bool, late: bool = False) -> str:
    """What a rank is told whose ids differ, at the first step or at a later one; ``late``: as for inputs on a GPU."""
    import autosp
    from autosp import runtime

    if late:
        runtime.copies_behind = lambda tensor: True
    autosp.initialize({"autosp": {"inner_backend": "eager", "verify": verify, "verify_timeout": 30.0}})
    model = toys.build("two_slices" if first and rank_info.rank == 1 else "pad_slice")
    compiled = torch.compile(model, backend="autosp")
    batch = toys.batch(16)
    try:
        if not first:
            compiled(**autosp.prepare_batch({k: v.clone() for k, v in batch.items()}))
            if rank_info.rank == 1:
                batch["input_ids"] = batch["input_ids"].flip(1)
        compiled(**autosp.prepare_batch(batch))
    except Exception as error:
        return type(getattr(error, "inner_exception", error)).__name__
    return "ran"


@pytest.mark.parametrize(
    ("verify", "first", "expected"),
    [
        ("inputs", False, "RankMismatchError"),
        ("compile", False, "ran"),
        ("compile", True, "RankMismatchError"),
    ],
)
def test_the_step_check_can_be_turned_off_and_the_one_at_compile_time_stays(
    ranks: RankPool, verify: str, first: bool, expected: str
):
    assert ranks.run(steps_with_other_ids, verify, first, timeout=100) == [expected] * 2


def late_check(rank_info: RankInfo) -> tuple[list[str], list[str]]:
    """The comparisons of a step around the program's run, and what a rank is told whose ids differ."""
    from autosp import runtime

    events: list[str] = []
    kept = runtime.copies_behind, runtime.agree, runtime.LocalProgram._wrap

    def noted(state: Any, kind: str, payload: Any, **more: Any) -> None:
        events.append(f"{kind} of {max(len(part) for part in payload.values())} bytes")
        kept[1](state, kind, payload, **more)

    def wrapped(self: Any, results: Any, index: int, spec: Any) -> Any:
        events.append("output")
        return kept[2](self, results, index, spec)

    runtime.agree, runtime.LocalProgram._wrap = noted, wrapped
    try:
        told = steps_with_other_ids(rank_info, "inputs", False, late=True)
    finally:
        runtime.copies_behind, runtime.agree, runtime.LocalProgram._wrap = kept
    return events, [told]


def test_inputs_on_a_gpu_are_compared_behind_the_queued_step(ranks: RankPool):
    """Shapes before the program runs, the content (32 bytes of digest) after it and before anyone gets an output."""
    for events, told in ranks.run(late_check, timeout=100):
        assert told == ["RankMismatchError"]
        before, after, *outputs = events[: events.index("output") + 1]
        assert before.startswith("step of") and before != after == "step of 32 bytes" and outputs == ["output"]
        # of the second step, whose content differs, no output is handed on
        assert events[-1] == "step of 32 bytes" and events.count("step of 32 bytes") == 2


def share_of_own_passes(rank_info: RankInfo) -> dict[str, float]:
    import autosp
    from autosp.backend import compile_times

    autosp.initialize({"autosp": {"inner_backend": "inductor"}})
    model = zoo.build("llama", num_hidden_layers=8)
    compiled = torch.compile(model, backend="autosp")
    with fresh_cache():  # a first step is one that Inductor has not compiled before
        start = time.perf_counter()
        compiled(**autosp.prepare_batch(zoo.batch(16))).loss.backward()
        return {**compile_times(), "step": time.perf_counter() - start}


@pytest.mark.slow
def test_own_passes_take_a_tenth_of_the_first_compiled_step(ranks: RankPool):
    for times in ranks.run(share_of_own_passes, timeout=580):
        assert times["autosp_s"] <= 0.1 * times["step"], {k: round(v, 2) for k, v in times.items() if v > 0.02}


class ModuleAttention(nn.Module):
    """torch's own attention module, weights returned and used."""

    def __init__(self, average: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(toys.VOCAB, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, toys.VOCAB)
        self.average = average

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        x = self.embed(input_ids)
        out, weights = self.attention(
            x, x, x, key_padding_mask=input_ids == 3, need_weights=True, average_attn_weights=self.average
        )
        logits = self.head(out)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return toys.Out(loss + weights.square().sum(), logits)


def module_attention(rank_info: RankInfo) -> list[parity.Result]:
    import autosp

    autosp.initialize(parity.CASE)
    results = []
    for average, length in ((True, 16), (False, 17)):
        torch.manual_seed(0)
        model = ModuleAttention(average)
        compiled = torch.compile(model, backend="autosp")
        results.append(parity.compare(model, compiled, toys.batch(length), prepare=autosp.prepare_batch))
    return results


def test_the_attention_module_of_torch_with_its_weights(ranks: RankPool):
    for results in ranks.run(module_attention, timeout=200):
        for result in results:
            result.check()


class WholeAttention(nn.Module):
    """Attention over a table of the model's own, which no token touches, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(toys.VOCAB, 8)
        self.table = nn.Parameter(torch.randn(1, 2, 5, 4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        read = F.scaled_dot_product_attention(self.table, self.table, self.table, dropout_p=0.5)
        return self.embed(input_ids).sum() + read.sum()


def whole_dropout(rank_info: RankInfo) -> str:
    import autosp

    autosp.initialize({"autosp": {"inner_backend": "eager"}})
    compiled: Any = torch.compile(WholeAttention(), backend="autosp")
    try:
        compiled(**autosp.prepare_batch({"input_ids": toys.batch(16)["input_ids"]}))
    except Exception as error:
        return str(error)
    return "ran"


def test_dropout_in_attention_over_whole_values_is_refused(ranks: RankPool):
    for message in ranks.run(whole_dropout, timeout=100):
        assert "dropout in attention over whole values would draw differently on each rank" in message
        assert "set its dropout to 0" in message
