"""Memory and time from the partitioned graphs: what a walk counts, how lengths and layers extend, what is refused."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch

from autosp.cli import plan as command
from autosp.cli.main import main
from autosp.errors import ConfigError, InputError
from autosp.plan.estimate import Hardware, Layered, estimate, longest
from autosp.plan.picture import tokens_text
from autosp.plan.program import Buffer, Program, Work, read_program
from autosp.plan.trace import Trace, trace_step
from autosp.plan.walk import _stretches, profile

S = sympy.Symbol("s", integer=True, positive=True)


def step(layers: int = 1) -> Trace:
    """A step by hand: each layer saves 8 bytes a token and reads them back; the head needs 100 a token for a moment."""
    forward, backward = Program(), Program()
    forward.buffers[0] = Buffer(10, "activations")
    forward.given["primals_1"] = 0
    forward.returned["primals_1"] = 0
    for layer in range(layers):
        forward.buffers[layer + 1] = Buffer(8 * S, "attention")
        forward.work.append(Work(layer, [layer + 1], {0}, flops=1000 * S, moved=8 * S))
        forward.returned[f"saved_{layer}"] = layer + 1
    backward.buffers = {n: Buffer(b.size, "activations") for n, b in forward.buffers.items()}
    backward.given = {"primals_1": 0, **{f"saved_{layer}": layer + 1 for layer in range(layers)}}
    head = layers + 1
    backward.buffers[head] = Buffer(100 * S, "loss")
    backward.work.append(Work(None, [head], {0}, flops=0, moved=100 * S))
    for layer in reversed(range(layers)):
        number = head + 1 + layer
        backward.buffers[number] = Buffer(10, "activations")
        backward.work.append(Work(layer, [number], {layer + 1, *([head] if layer == layers - 1 else [])}, sent=3 * S))
        backward.returned[f"gradient_{layer}"] = number
    return Trace(
        [forward],
        [backward],
        weights=10 * layers,
        parameters=10 * layers,
        elements=5 * layers,
        length=4,
        symbol=S,
    )


def test_a_walk_frees_what_was_saved_and_keeps_gradients() -> None:
    found = profile(step(layers=3), 7)
    parts = {name: moment.parts for name, moment in found.moments.items()}
    assert parts["forward"]["attention"] == 3 * 8 * 7 and parts["forward"]["gradients"] == 0
    assert parts["head"] == {**parts["forward"], "loss": 700}
    # in the last layer the head's buffer is still read; in the first all but its own is freed
    assert parts["last"]["loss"] == 700 and parts["last"]["gradients"] == 10 and parts["last"]["attention"] == 3 * 56
    assert (
        parts["middle"]["loss"] == 0 and parts["middle"]["attention"] == 2 * 56 and parts["middle"]["gradients"] == 20
    )
    assert parts["first"]["attention"] == 56 and parts["first"]["gradients"] == 30
    assert found.flops == 3 * 7000 and found.sent == 3 * 42 / 2


def test_few_layers_tell_about_many() -> None:
    hardware = Hardware(memory=1e4, flops=1e6, bandwidth=1e6, link=1e6, headroom=0.0)
    few = Layered({2: step(2), 3: step(3)}, layers=9)
    all_of_them = Layered({9: step(9)}, layers=9)
    for length in (4, 1000):
        a, b = (estimate(layered, length, hardware=hardware) for layered in (few, all_of_them))
        assert a.parts == pytest.approx(b.parts) and a.moment == b.moment
        assert a.seconds == pytest.approx(b.seconds) and a.flops == pytest.approx(b.flops)
        assert a.sent == pytest.approx(b.sent)


def test_weights_optimizer_and_sharding() -> None:
    layered, hardware = Layered({1: step()}, layers=1), Hardware()
    plain = estimate(layered, 4, hardware=hardware, optimizer="adamw-fp32")
    # 5 numbers of 2 bytes: master weights and two states in fp32
    assert plain.parts["weights"] == 10 and plain.parts["optimizer"] == 60
    assert estimate(layered, 4, hardware=hardware, optimizer="adamw").parts["optimizer"] == 20
    shared = estimate(layered, 4, hardware=hardware, optimizer="adamw-fp32", sharding="optimizer", replicas=4)
    assert shared.parts["optimizer"] == 15 and shared.parts["weights"] == 10
    assert estimate(layered, 4, hardware=hardware, sharding="parameters", replicas=4).parts["weights"] == 2.5
    with pytest.raises(InputError, match="optimizer 'lion'; allowed: adamw"):
        estimate(layered, 4, hardware=hardware, optimizer="lion")
    with pytest.raises(InputError, match="sharding 'zero9'; allowed: none"):
        estimate(layered, 4, hardware=hardware, sharding="zero9")


def test_the_longest_that_fits_is_the_longest() -> None:
    layered = Layered({1: step()}, layers=1)
    hardware = Hardware(memory=20_000, headroom=0.1)
    found = longest(layered, hardware=hardware, step=2, optimizer="none")
    assert found is not None and found.length % 2 == 0 and found.total <= 18_000
    assert estimate(layered, found.length + 2, hardware=hardware, optimizer="none").total > 18_000
    assert longest(layered, hardware=Hardware(memory=10), step=2) is None


def test_a_model_that_fixes_its_length() -> None:
    trace = step()
    trace.symbol = None
    with pytest.raises(InputError, match="fixes its length when it is compiled .4 tokens were traced, 8 asked"):
        estimate(Layered({1: trace}, 1), 8, hardware=Hardware())


def llama(layers: int = 1, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512}
    model = LlamaForCausalLM(
        LlamaConfig(
            **sizes, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied
        )
    )

    def batch(length: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 512, (1, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return model.train(), batch


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A Llama of one layer on 2 ranks."""
    return trace_step(llama, length=256, ranks=2)


def test_the_partitioned_graph_of_a_llama(trace: Trace) -> None:
    """Saved activations by hand: what Inductor's partition of one layer keeps, at the traced length and at another."""
    weights = 2 * (2 * 512 * 64 + 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 3 * 64)
    # beside the parameters, the inverse frequencies of the rotary embedding
    assert trace.parameters == weights and 0 < trace.weights - weights <= 128
    assert trace.symbol is not None and len(trace.forward) == len(trace.backward) == 1
    for length in (256, 1024):
        found = profile(trace, length)
        rows = length // 2
        saved = found.moments["forward"].parts
        # q, k, v of this rank's 2 + 1 + 1 heads over the whole sequence as they arrived in one exchange
        assert saved["communication"] == length * (2 + 1 + 1) * 16 * 2
        # what attention gives with its 2 heads, and its log-sum-exp
        assert saved["attention"] == length * (2 * 16 * 2 + 2 * 4)
        # bf16 logits; fp32 maximum and logarithm of the sum of each row
        assert rows * 512 * 2 <= saved["loss"] <= rows * (512 * 2 + 64)
        peak = found.moments["head"]
        # in bf16: the logits, their gradient, and the zeros that autograd makes for outputs that the loss does not use:
        # the logits, and keys and values of the cache
        assert 3 * rows * 512 * 2 <= peak.parts["loss"] <= 1.15 * rows * 3 * 512 * 2
        # every gradient is small: summed in fp32 and rounded at the end, so that the layer's highest moment holds the
        # head's in fp32, and that of the embedding when it comes
        assert found.moments["last"].total >= 4 * 512 * 64
        # the pairs (made, returned) of the backward are complete: what is returned is there at the end
        (backward,) = trace.backward
        made = {number for work in backward.work for number in work.made}
        assert set(backward.returned.values()) <= made and len(backward.returned) == 12
        assert all(size >= 0 for moment in found.moments.values() for size in moment.parts.values())
        # q, k, v and the result there and back, in forward and backward; an all-reduce of every gradient, all of them
        # small, so that they are summed in fp32; and that of the loss
        exchanged = 2 * rows * (64 + 32 + 32 + 64) * 2 / 2
        assert found.sent == pytest.approx(2 * weights + exchanged + 8, rel=0.01)
        # 6 flops a token and weight of a product; attention of 2 heads: 4 products forward and backward of 3.5 in all
        products = 6 * rows * (512 * 64 + 64 * 192 + 3 * 64 * 96)
        attention = 3.5 * 2 * 2 * 2 * length * length * 16 / 2
        assert found.flops == pytest.approx(products + attention, rel=0.02)


@pytest.mark.slow
def test_another_length_is_as_if_it_had_been_traced(trace: Trace) -> None:
    a, b = profile(trace, 1024), profile(trace_step(llama, length=1024, ranks=2), 1024)
    assert {n: m.parts for n, m in a.moments.items()} == {n: m.parts for n, m in b.moments.items()}
    assert a.flops == b.flops and a.sent == b.sent


@pytest.mark.slow
def test_four_layers_of_a_llama_from_two_and_three() -> None:
    traces = {n: trace_step(lambda n=n: llama(n), length=256, ranks=2) for n in (2, 3, 4)}
    few, whole = Layered({n: traces[n] for n in (2, 3)}, 4), Layered({4: traces[4]}, 4)
    a, b = (estimate(layered, 4096, hardware=Hardware()) for layered in (few, whole))
    assert a.total == pytest.approx(b.total, rel=0.01) and a.seconds == pytest.approx(b.seconds, rel=0.01)


def test_layers_that_differ_are_not_extended_from_others() -> None:
    """Ten layers: which two numbers of them tell about all, by what each layer adds."""

    def few(sizes: list[int], kinds: list[str] | None = None) -> list[int | None]:
        return command._few_for_many(lambda count: 1000 + sum(sizes[:count]), kinds or [], len(sizes))

    assert few([7] * 10) == [2, 3]
    assert few([7] * 10, ["full", "sliding"] * 5) == [2, 4]
    # dense layers first, then experts: traced where the last layer is one of the many
    assert few([7] * 3 + [90] * 7) == [4, 5]
    # experts in every other layer, which the configuration's kinds do not tell
    assert few([7, 90] * 5) == [2, 4]
    # kinds without a turn, and a last layer of its own, as they are
    assert few([7] * 10, ["full"] * 5 + ["sliding"] * 5) == [10]
    assert few([7] * 9 + [90]) == [10]


def test_layers_of_a_model_with_experts_after_dense_ones(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    for dense, few in (([0, 1, 2], [4, 5]), ([], [2, 3]), ([8], [9])):
        config = Qwen3MoeConfig(**sizes, **heads, num_hidden_layers=9, mlp_only_layers=dense)
        config.architectures = ["Qwen3MoeForCausalLM"]
        config.save_pretrained(tmp_path)
        assert command._layer_counts(str(tmp_path / "config.json"), None) == (few, 9)


def test_what_the_json_does_not_set_is_noted() -> None:
    assert command._notes(None, 64, False, "none") == []
    notes = " ".join(command._notes(None, 1 << 26, True, "optimizer"))
    assert "model.gradient_checkpointing_enable()" in notes and "shares the optimizer" in notes
    assert "max_position_embeddings" in notes and str(1 << 26) in notes


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_head_that_ranks_share(trace: Trace, tied: bool) -> None:
    """Half of the head's weight, half of the logits, and the traffic of two groups."""
    whole = trace_step(lambda: llama(tied=True), length=256, ranks=2) if tied else trace
    shared = trace_step(lambda: llama(tied=tied), length=256, ranks=2, tp=2)
    assert whole.parameters - shared.parameters == 2 * 512 * 64 / 2
    a, b = (profile(one, 4096).moments["head"].parts["loss"] for one in (whole, shared))
    assert b == pytest.approx(a / 2, rel=0.15)
    a, b = (profile(one, 4096).sent for one in (whole, shared))
    # the hidden states' gradient is summed over tp in fp32; that of half the head, small and so in fp32, stays away
    expected = 2048 * 64 * 4 - 512 * 64 * 4 / 2
    # each rank has the rows of half the vocabulary, so that embedded tokens are summed over tp, in bf16
    assert b - a == pytest.approx(expected + (2048 * 64 * 2 if tied else 0), rel=0.02)


def test_one_process_is_told_its_budget() -> None:
    """It acts there as over a group."""
    from types import SimpleNamespace
    from typing import cast

    from autosp.cli.plan import Row, _config

    row = cast(Row, SimpleNamespace(dp=1, sp=1, tp=1, budget=0.5))
    assert _config(row, {}, False)["autosp"] == {"activation_memory_budget": 0.5}


def test_a_smaller_budget_keeps_less(trace: Trace) -> None:
    small = trace_step(llama, length=256, ranks=2, budget=0.0)
    kept = [profile(one, 4096).moments["forward"].parts for one in (trace, small)]
    assert sum(kept[1].values()) < 0.8 * sum(kept[0].values())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints, with the compilation replaced by the step by hand."""
    monkeypatch.setattr(command, "_trace", lambda model, ranks, tp, *_: Layered({1: step()}, layers=1))
    picture = tmp_path / "plan.png"
    arguments = ["--gpus", "4", "--memory", "1MiB", "--seq-len", "1k", "--budget", "1,0.5", "--picture", str(picture)]
    code, out = run(*arguments, "--json")
    assert code == 0
    found = json.loads(out)
    assert [(row["dp"], row["sp"], row["budget"]) for row in found["rows"]] == [
        (dp, sp, budget) for dp, sp in ((4, 1), (2, 2), (1, 4)) for budget in (1.0, 0.5)
    ]
    row = found["rows"][0]
    assert row["fits"] and row["bytes"] == pytest.approx(sum(row["parts"].values())) and row["longest"] > 1024
    assert found["config"]["data_parallel_size"] * found["config"]["sequence_parallel_size"] == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out = run(*arguments)
    assert "The JSON to use:" in out and "budget" in out and "\x1b[" not in out
    code, out = run("--gpus", "4", "--tp", "1", "--tp", "2", "--memory", "1MiB", "--seq-len", "1k", "--json")
    assert [(r["dp"], r["sp"], r["tp"]) for r in json.loads(out)["rows"][::2]] == [
        (4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2)
    ]  # fmt: skip
    code, out = run("--gpus", "2", "--sp", "1", "--tp", "2", "--memory", "1MiB", "--seq-len", "1k", "--json")
    head = json.loads(out)["config"]["tensor_parallel"]
    # the built-in model has tied embeddings
    assert head == {"autotp_size": 2, "vocab_parallel_lm_head": True, "vocab_parallel_embedding": True}
    code, out = run("--gpus", "4", "--memory", "1MiB", "--seq-len", "1M")
    assert code == 1 and "1M tokens fit in no way; the longest that fits is" in out


def run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    return int(ended.value.code or 0), out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "80"], "--memory got '80': give a number with TiB, GiB"),
        (["--seq-len", "1T"], "--seq-len got '1T'"),
        (["--budget", "2"], "--budget got '2': give numbers from 0 to 1"),
        (["--budget", "a,b"], "--budget got 'a,b'"),
        (["--gpus", "8", "--sp", "3"], "--sp 3: it must divide --gpus 8"),
        (["--gpus", "8", "--tp", "3"], "--tp 3: it must divide --gpus 8"),
        (["--gpus", "8", "--sp", "8", "--tp", "2"], "--sp times --tp must divide --gpus 8"),
        (["--dtype", "int8"], "--dtype int8: choose bf16 or"),
        (["--optimizer", "lion"], "--optimizer lion: choose adamw or"),
        (["--sharding", "zero"], "--sharding zero: choose none or"),
        (["--picture", "plan.txt"], "a .png file in a folder that exists"),
        (["nowhere.json"], "there is no such path"),
    ],
)
def test_mistakes_end_with_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(*arguments)
    assert code == 2 and message in capsys.readouterr().err


def test_a_refused_model_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run("tool_models:refused", "--gpus", "2", "--sp", "2", "--budget", "1", "--seq-len", "16")
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and lines[-1].startswith("autosp: error: aten.cumsum.default: ") and "Traceback" not in lines


def test_a_configuration_that_cannot_be_read_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"a":')
    code, _ = run(str(tmp_path / "config.json"))
    assert code == 2 and "transformers cannot read it" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_length_that_the_model_has_no_positions_for_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import BertConfig

    BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32).save_pretrained(tmp_path)
    code, _ = run(str(tmp_path / "config.json"), "--seq-len", "1k")
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and last.endswith("--seq-len 1024: this model has a table of 512 positions; choose at most 512")


def test_kinds_of_layers_that_follow_from_their_number(tmp_path: Path) -> None:
    """Mamba's configuration computes them, and lets nobody set them."""
    from transformers import MambaConfig

    MambaConfig(hidden_size=16, num_hidden_layers=3, vocab_size=32).save_pretrained(tmp_path)
    one, two, three = (command._elements(str(tmp_path / "config.json"), n) for n in (1, 2, 3))
    assert two - one == three - two > 0


def test_a_length_that_ranks_do_not_divide_is_judged_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = step()
    monkeypatch.setattr(command, "_trace", lambda *_: Layered({1: trace}, layers=1))
    for length, judged in (("6", 6), ("7", 12), ("2", 6)):
        _, out = run("--gpus", "3", "--sp", "3", "--seq-len", length, "--budget", "1", "--json")
        assert json.loads(out)["rows"][0]["flops"] == 1000 * judged


def test_work_of_the_head_that_is_put_off_is_at_the_newest_layers_moment() -> None:
    """Two layers have no layer between them, whose highest moment more layers would extend."""
    order = [Work(number) for number in (None, 1, None, 1, 0, None, 1)]
    assert _stretches(order) == ["head", "last", "last", "last", "first", "first", "last"]


def test_sizes() -> None:
    assert command.parse_memory("80GiB", option="--memory") == 80 * 2**30
    assert command.parse_memory("1.5 TB", option="--memory") == 1.5e12
    with pytest.raises(ConfigError, match="--link got 'fast'"):
        command.parse_memory("fast", option="--link")
    assert [tokens_text(n) for n in (512, 65536, 3 << 19)] == ["512", "64k", "1.5M"]


def test_what_is_read_inside_a_fused_kernel_is_no_buffer() -> None:
    """exp(x) is computed where its sum is: nothing is stored but the sum; a product needs its operand stored."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y.sum(), torch.mm(x.cos(), x)

    program = read_program(make_fx(function, tracing_mode="fake")(torch.ones(4, 4)).graph)
    assert [sorted(program.buffers[n].size for n in work.made) for work in program.work] == [[4], [64], [64]]
    assert [work.flops for work in program.work] == [0, 0, 128]
