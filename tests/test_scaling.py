"""What a rank sends, counted in the program that it runs, is what the closed forms say, for any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pool import RankPool
from torch._subclasses.fake_tensor import FakeTensor

from autosp.cli.main import main
from autosp.plan.scaling import Shape, closed_form, count

LENGTH = 8192


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "scaling", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("attention", "kv_heads"),
    [
        ("ulysses", 64),
        pytest.param("ring", 8, marks=pytest.mark.slow),
        pytest.param("allgather_kv", 8, marks=pytest.mark.slow),
    ],
)
def test_counts_are_the_closed_form_up_to_64_ranks(attention: str, kv_heads: int) -> None:
    shape = Shape(kv_heads=kv_heads, layers=1)
    few, many = (count(attention, ranks, LENGTH, shape) for ranks in (8, 64))
    for found in (few, many):
        assert (found.forward_bytes, found.backward_bytes) == (found.closed_forward, found.closed_backward)
    assert few.operators == many.operators  # compiling costs the same at any number of ranks
    if attention == "ulysses":
        assert many.forward_bytes / few.forward_bytes == pytest.approx((63 / 64 / 64) / (7 / 8 / 8))
        assert (few.messages, many.messages) == (4 * 7, 4 * 63)  # two exchanges, and two in the backward
    else:
        assert 1 < many.forward_bytes / few.forward_bytes < 8 / 7  # nearly constant
        assert many.length == LENGTH


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"),
    [(7, 1, 4), pytest.param(9, 3, 4, marks=pytest.mark.slow), pytest.param(3, 3, 8, marks=pytest.mark.slow)],
)
def test_heads_that_the_group_does_not_divide(heads: int, kv_heads: int, ranks: int) -> None:
    """By hand for the last rank: to each other rank its heads of q, k and v, and the last rank's own heads back."""
    size, rows = 16, LENGTH // ranks
    found = count("ulysses", ranks, LENGTH, Shape(heads, kv_heads, size, layers=1))
    blocks = [range(p * heads // ranks, (p + 1) * heads // ranks) for p in range(ranks)]
    pieces = [len(block) + 2 * len({head * kv_heads // heads for head in block}) for block in blocks]
    there, back = sum(pieces[:-1]), len(blocks[-1]) * (ranks - 1)
    assert found.forward_bytes == found.closed_forward == (there + back) * rows * size * 2
    gradients = pieces[-1] * (ranks - 1) + heads - len(blocks[-1])
    assert found.backward_bytes == found.closed_backward == gradients * rows * size * 2


@pytest.mark.slow
def test_operators_do_not_grow_with_the_length_and_bytes_grow_evenly() -> None:
    short, long = (count("ulysses", 16, length, Shape(layers=1)) for length in (LENGTH, 16 * LENGTH))
    assert long.operators == short.operators
    assert (long.forward_bytes, long.other_bytes) == (16 * short.forward_bytes, short.other_bytes)


def ring_body(rank_info, heads, kv_heads, dim, length):
    """Bytes and messages that a rank really hands to the exchange of a ring, forward and backward."""
    import autosp
    from autosp.custom_ops import ring_attention

    sent = []
    real = ring_attention._c10d

    class Counting:
        wait_tensor = real.wait_tensor

        @staticmethod
        def all_to_all_single(x, receive, send, group):
            if not isinstance(x, FakeTensor):  # tracing goes through here too
                sent.append(sum(send) * x.element_size())
            return real.all_to_all_single(x, receive, send, group)

    ring_attention._c10d = Counting
    try:
        settings = {"attention": "ring", "inner_backend": "eager"}
        autosp.initialize({"sequence_parallel_size": rank_info.world_size, "autosp": settings})
        weight = torch.randn(heads * dim + 2 * kv_heads * dim, 8, dtype=torch.bfloat16, requires_grad=True)

        def attend(input_ids, table):
            q, k, v = (
                part.unflatten(-1, (-1, dim)).transpose(1, 2)
                for part in torch.nn.functional.linear(table[input_ids], weight).split(
                    [heads * dim, kv_heads * dim, kv_heads * dim], -1
                )
            )
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum()

        table = torch.randn(11, 8, dtype=torch.bfloat16)
        ids = torch.arange(length)[None] % 11
        autosp.prepare_autosp_inputs(ids)
        loss = torch.compile(attend, backend="autosp")(ids, table)
        forward, number = sum(sent), len(sent)
        loss.backward()
    finally:
        ring_attention._c10d = real
    return forward, sum(sent) - forward, number, len(sent) - number


def test_a_ring_sends_what_the_closed_form_says(ranks: RankPool) -> None:
    shape = Shape(heads=4, kv_heads=2, head_dim=16)
    forward, backward = closed_form("ring", shape, 3, 12)
    for found in ranks.run(ring_body, 4, 2, 16, 12, world_size=3, timeout=90):
        assert found == (forward, backward, 2, 5)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, picture = tmp_path / "out.json", tmp_path / "out.png"
    sizes = ["--ranks", "4", "--strong", "64", "--weak", "16", "--heads", "4", "--kv-heads", "4", "--head-dim", "16"]
    assert command(*sizes, "--attention", "ulysses", "--json", str(target), "--picture", str(picture)) == 0
    (row,) = json.loads(target.read_text())["rows"]
    assert row["forward_bytes"] == row["closed_forward"] == 2 * 8 * 16 * 16 * 0.75 * 2
    assert "| ulysses | 4 | 64 |" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "3"], "--ranks 3"),
        (["--ranks", "0"], "a whole number of ranks of at least 2"),
        (["--attention", "magic"], "--attention magic"),
        (["--heads", "10", "--kv-heads", "4"], "--heads 10"),
        (["--strong", "many"], "--strong"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
