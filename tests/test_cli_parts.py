"""The parts of `autosp train` without processes: text to tokens, wrong arguments, checkpoints, what is said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autosp.cli import checkpoint, corpus, launch, loop, main, metrics, models, progress, settings, train, worker
from autosp.cli.batches import Batches
from autosp.errors import ConfigError, InputError, InternalError, RankMismatchError, UnsupportedGraphError
from autosp.randomness import draws_in_training

# --- text to tokens


def test_files_come_sorted_once_and_only_text(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("z.txt", "a.md", "b/c.py", "b/d.jsonl", "picture.png", ".git/x.txt"):
        (tmp_path / name).write_text("{}")
    found = corpus.find_files([str(tmp_path), str(tmp_path / "*.md"), str(tmp_path / "z.txt")])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a.md", "b/c.py", "b/d.jsonl", "z.txt"]


def test_without_data_it_is_the_standard_library() -> None:
    found = corpus.find_files([])
    assert len(found) > 100
    assert {path.suffix for path in found} == {".py"}
    assert not [path for path in found if "site-packages" in path.parts or "test" in path.parts]


def test_byte_tokens_are_the_bytes_with_a_mark_between_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("né\n".encode())
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n\n{"text": "yz", "id": 3}\n')
    tokenizer = corpus.ByteTokenizer(vocab_size=264, end_id=256)
    described = corpus.build_tokens([tmp_path / "a.txt", tmp_path / "b.jsonl"], tokenizer, tmp_path / "data")
    tokens, read = corpus.open_tokens(tmp_path / "data")
    assert read == described
    assert tokens.tolist() == [*"né\n".encode(), 256, ord("x"), 256, *b"yz", 256]
    assert tokens.dtype == np.uint16


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab")
    corpus.build_tokens([tmp_path / "a.txt"], corpus.ByteTokenizer(vocab_size=70000, end_id=69999), tmp_path / "data")
    assert corpus.open_tokens(tmp_path / "data")[0].tolist() == [97, 98, 69999]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "x"}\nnot json\n', r"a\.jsonl:2 is not valid JSON"),
        ("a.jsonl", '{"content": "x"}\n', r'a\.jsonl:1 has no "text" string'),
        ("a.txt", "", "hold no text"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        corpus.build_tokens([tmp_path / name], corpus.ByteTokenizer(264, 256), tmp_path / "data")


def test_a_cut_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdef")
    corpus.build_tokens([tmp_path / "a.txt"], corpus.ByteTokenizer(264, 256), tmp_path / "data")
    with (tmp_path / "data" / "tokens.bin").open("r+b") as file:
        file.truncate(4)
    with pytest.raises(InputError, match="has 2 tokens, 7 were written"):
        corpus.open_tokens(tmp_path / "data")


def test_batches_are_a_function_of_seed_and_position() -> None:
    tokens = np.arange(100, dtype=np.uint16)
    one, other = Batches(tokens, seq_len=10, seed=3), Batches(tokens, seq_len=10, seed=3)
    whole = one.at(0, 25)
    assert whole.dtype == torch.int64
    assert torch.equal(other.at(17, 8), whole[17:25])
    assert torch.equal(other.at(0, 4), whole[:4])
    for epoch in (whole[:10], whole[10:20]):
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 100, 10))
    assert not torch.equal(whole[:10], whole[10:20])
    assert not torch.equal(Batches(tokens, seq_len=10, seed=4).at(0, 10), whole[:10])


def test_too_little_text_is_refused() -> None:
    with pytest.raises(InputError, match="9 tokens, one sequence takes 10"):
        Batches(np.arange(9), seq_len=10, seed=0)


# --- wrong arguments: one line, what to do, exit code 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nope"], "--nope"),
        (["--steps", "many"], "--steps"),
        (["--steps", "0"], "--steps"),
        (["--nproc", "0"], "--nproc"),
        (["--seq-len", "4q"], "--seq-len got '4q'"),
        (["--seq-len", "1"], "at least 2"),
        (["--dtype", "fp16"], "choose fp32 or bf16"),
        (["--inner-backend", "tvm"], "choose inductor or aot_eager or eager"),
        (["--lr", "-1"], "a positive number is needed"),
        (["--device", "tpu"], "choose cpu or cuda"),
        (["--data", "/nonexistent/x*.txt"], "no such file or folder"),
        (["--data", "{tmp}/picture.png"], ".png is not read; use .txt, .md, .py or .jsonl"),
        (["--data", "{tmp}/empty"], "holds no .txt, .md, .py or .jsonl file"),
        (["--model", "/nonexistent"], "there is no such path"),
        (["--model", "{tmp}/empty"], "has no config.json"),
        (["--model", "{tmp}/weightless"], "has no weights"),
        (["--model", "{tmp}/picture.png"], "give a folder, a config.json or a .gguf file"),
        (["--model", "{tmp}/run"], "is a run folder"),
        (["--config", "{tmp}/none.json"], "there is no file"),
        (["--config", "{tmp}/broken.json"], "is not valid JSON"),
        (["--config", "{tmp}/list.json"], "an object {...} is needed"),
        (["--config", "{tmp}/colour.json"], "unknown 'colour'"),
        (["--config", "{tmp}/sizes.json", "--nproc", "3", "--device", "cpu"], "do not cover a world of 3"),
        (["--out", "{tmp}/run"], "exists: choose another"),
        (["--resume", "/nonexistent"], "there is no such run folder"),
        (["--resume", "{tmp}/run"], "no complete checkpoint"),
        (["--resume", "{tmp}/run", "--seq-len", "1k"], "--seq-len cannot change on --resume"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    for folder in ("empty", "weightless", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "broken.json").write_text('{"a": }')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "colour.json").write_text('{"autosp": {"colour": 1}}')
    (tmp_path / "sizes.json").write_text('{"sequence_parallel_size": 2}')
    (tmp_path / "picture.png").write_text("")
    with pytest.raises(SystemExit) as stopped:
        main.main(["train", *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments)])
    shown = capsys.readouterr()
    assert stopped.value.code == 2
    assert message in shown.err
    assert shown.err.startswith("autosp: error: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["train", "--model", "/nonexistent", "--debug"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        train._machine({"device": "cuda"})


def test_more_processes_than_torchrun_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert train._machine({"device": "cpu"})["nproc"] == 2
    with pytest.raises(ConfigError, match="torchrun has started 2"):
        train._machine({"device": "cpu", "nproc": 3})


@pytest.mark.parametrize(("text", "size"), [("512", 512), ("4k", 4096), ("1.5K", 1536), ("1m", 1 << 20), (" 2 ", 2)])
def test_sizes(text: str, size: int) -> None:
    assert settings.parse_size(text, option="--seq-len") == size


def test_training_settings_of_the_json_are_taken_over() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.9], "weight_decay": 0.1}},
        "zero_optimization": {"stage": 1},
        "scheduler": {"type": "WarmupLR"},
    }
    found, notes = settings.from_engine_config(config)
    assert found == {
        "batch_size": 3,
        "accumulation": 2,
        "clip": 0.5,
        "dtype": "bf16",
        "lr": 1e-4,
        "betas": (0.8, 0.9),
        "weight_decay": 0.1,
    }
    assert len(notes) == 1
    assert "scheduler, zero_optimization" in notes[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "Lion"}}, 'autosp train has "AdamW"'),
        ({"fp16": {"enabled": True}}, "fp32 and bf16"),
        ({"gradient_accumulation_steps": 0}, "a whole number of at least 1"),
        ({"gradient_clipping": "much"}, "a number that is not negative"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, "give two numbers"),
        ({"bf16": True}, "a section"),
    ],
)
def test_wrong_settings_of_the_json_are_refused(config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.from_engine_config(config)


def test_settings_survive_the_file_and_unknown_keys_do_not(tmp_path: Path) -> None:
    written = settings.TrainSettings(out="x", data=("a", "b"), config={"autosp": {}}, betas=(0.5, 0.6))
    written.write(tmp_path / "run.json")
    assert settings.TrainSettings.read(tmp_path / "run.json") == written
    (tmp_path / "run.json").write_text('{"out": "x", "colour": 1}')
    with pytest.raises(ConfigError, match="colour"):
        settings.TrainSettings.read(tmp_path / "run.json")


def test_a_model_without_room_for_bytes_is_refused() -> None:
    from transformers import LlamaConfig

    with pytest.raises(InputError, match="vocabulary of 100 cannot hold"):
        models.load_tokenizer(None, LlamaConfig(vocab_size=100))


def test_learned_positions_limit_the_length_and_rotary_ones_do_not() -> None:
    from transformers import GPT2Config, LlamaConfig

    with pytest.raises(InputError, match="choose at most 64"):
        models.check_length(GPT2Config(n_positions=64), 65)
    models.check_length(GPT2Config(n_positions=64), 64)
    models.check_length(LlamaConfig(max_position_embeddings=64), 65)


def test_dropout_is_found_in_modules_and_in_the_configuration() -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    gpt2 = GPT2Config(vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    assert draws_in_training(AutoModelForCausalLM.from_config(gpt2))
    assert draws_in_training(AutoModelForCausalLM.from_config(LlamaConfig(**sizes, attention_dropout=0.1)))
    assert not draws_in_training(AutoModelForCausalLM.from_config(LlamaConfig(**sizes)))


# --- what stops a run


def trainer(**more: object) -> loop.Trainer:
    """A trainer that has come to step 7 and has no model: what it checks needs none."""
    parallel = SimpleNamespace(first=True, sp_size=2, dp_size=1, from_first=lambda value: value)
    parts = dict.fromkeys(("model", "compiled", "optimizer", "batches"))
    position = checkpoint.Position(step=7, samples=0, digest="")
    return loop.Trainer(settings.TrainSettings(out="x", **more), parallel, position=position, **parts)


def test_a_loss_that_differs_from_one_process_stops_before_training() -> None:
    assert "difference 1.0e-06" in trainer().compare(2.0, 2.000001)
    for dtype, loss in (("fp32", 2.001), ("bf16", 2.1), ("fp32", float("nan"))):
        with pytest.raises(InternalError, match="Nothing was trained"):
            trainer(dtype=dtype).compare(2.0, loss)
    assert "difference" in trainer(dtype="bf16").compare(2.0, 2.001)


def test_a_loss_that_is_not_finite_names_the_step() -> None:
    with pytest.raises(InputError, match="the loss is nan at step 8: lower --lr"):
        trainer()._check_losses(torch.tensor([1.0, float("nan")], dtype=torch.float64))


def test_speed_leaves_the_compiling_step_out() -> None:
    one = trainer(steps=100, seq_len=10)
    reports = [
        one.describe({"step": step, "loss": 1.0, "seconds": seconds}, 0)
        for step, seconds in enumerate([100.0] + [0.5] * 30, 1)
    ]
    assert [report.tokens_per_s for report in reports] == [0.1] + [20.0] * 30
    assert [report.compiled_in for report in reports] == [100.0] + [None] * 30


def test_what_a_backend_raises_is_found_inside_what_dynamo_raises() -> None:
    def refuse(gm: object, inputs: object) -> None:
        raise UnsupportedGraphError("no rule", operator="aten.cumsum")

    with pytest.raises(Exception, match="no rule") as raised:
        torch.compile(torch.sin, backend=refuse)(torch.ones(2))
    found, code = worker.exit_code(raised.value)
    assert isinstance(found, UnsupportedGraphError)
    assert code == 2
    assert worker.exit_code(RankMismatchError("x"))[1] == 1
    assert worker.exit_code(KeyError("x"))[1] == 1


# --- checkpoints


def save(folder: Path, step: int) -> Path:
    model = models.load_model(None)
    optimizer = torch.optim.AdamW(model.parameters())
    position = checkpoint.Position(step=step, samples=2 * step, digest="d")
    rng = [checkpoint.rng_state()]
    return checkpoint.save(folder, position, model=model, tokenizer=None, optimizer=optimizer, rng=rng)


def test_a_crash_while_saving_leaves_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path, 1)

    def crash(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint, "_sync", crash)
        save(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == first
    assert checkpoint.latest(tmp_path) != save(tmp_path, 2)
    assert checkpoint.read_position(tmp_path / "checkpoint-000002").samples == 4
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000002", "checkpoint-000003"]


def test_random_numbers_go_on_and_another_world_is_noticed(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    expected = torch.rand(3)
    torch.rand(5)
    assert checkpoint.load_rng(folder, rank=0, world=1)
    assert torch.equal(torch.rand(3), expected)
    assert not checkpoint.load_rng(folder, rank=0, world=2)


def test_metrics_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "lo')
    rows = metrics.Metrics(path, step=1)
    rows.add({"step": 2, "loss": 1.5})
    rows.close()
    assert metrics.read(path) == [{"step": 1, "loss": 3}, {"step": 2, "loss": 1.5}]


# --- what is said


def test_the_killed_rank_is_named_and_not_the_one_that_lost_it() -> None:
    def failure(exitcode: int, message: str, timestamp: float) -> SimpleNamespace:
        return SimpleNamespace(exitcode=exitcode, message=message, timestamp=timestamp)

    lost = failure(1, "RuntimeError: ... Connection closed by peer [127.0.0.1]:1", 1)
    assert launch.root_cause({0: lost, 1: failure(-9, "Signal 9 received", 2)})[0] == 1
    assert launch.root_cause({0: lost, 1: failure(1, "KeyError: 'x'", 2)})[0] == 1
    assert launch.root_cause({0: lost, 1: failure(2, "InputError: no", 2)})[0] == 1
    assert launch.root_cause({0: lost, 1: failure(-15, "Signal 15 received", 0)})[0] == 0


def test_plain_progress_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    says = progress.Plain()
    with says.stage("Reading") as detail:
        detail("3 files")
    with says.training(2, 0) as show:
        first = progress.StepReport(1, 2.5, tokens_per_s=10.0, peak_bytes=3 << 30, seconds_left=9000, compiled_in=30.25)
        show(first)
        show(progress.StepReport(step=2, loss=2.5, tokens_per_s=1234.4, peak_bytes=3 << 30, seconds_left=125))
    shown = capsys.readouterr().out
    assert "step 1/2  loss 2.5000  compiled in 30.2 s  peak 3.00 GiB\n" in shown
    assert "Reading ...\n  done in 0.0 s  3 files\n" in shown
    assert "step 2/2  loss 2.5000  1,234 tokens/s  peak 3.00 GiB  2:05 left" in shown


def test_progress_of_a_report_is_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.reporter(True, to_stderr=True).stage("Reading"):
        pass
    with progress.reporter(False, to_stderr=True).stage("Reading on another rank"):
        pass
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == "Reading ...\n  done in 0.0 s\n"
