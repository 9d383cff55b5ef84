"""Rules of the vocabulary axis: each operator on logits that arrive cut over the vocabulary, against whole ones.

"S" is the size of the vocabulary. Four ranks: sizes that they divide, that they do not, and with an empty shard.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rule_harness import Case, Found, Input, run_cases
from torch.nn import functional as F

from autosp.layout.axis import Axis
from autosp.layout.call import Refusal
from autosp.layout.placement import Shard
from autosp.layout.rules.vocabulary import own_columns

Z = Input("float", (2, 3, "S"), at=2)
FLAT = Input("float", (6, "S"), at=1)
TEACHER = Input("float", (2, 3, "S"))
IDS = Input(("int", 5), (2, 3))
FLAT_IDS = Input(("int", 5), (6,))
TOP = Input(("int", 5), (2, 3, 2))
WEIGHTS = Input("probability", ("S",), grad=False)


def entropy(z):
    p, logp = torch.softmax(z, -1), torch.log_softmax(z, -1)
    return -(p * logp).sum(-1)


def generalised_jsd(z, t):
    p, q = torch.log_softmax(z, -1), torch.log_softmax(t, -1)
    m = torch.logsumexp(torch.stack([p, q]) - 0.6931471805599453, dim=0)
    both = F.kl_div(m, p, reduction="none", log_target=True) + F.kl_div(m, q, reduction="none", log_target=True)
    return both.sum(-1).mean()


def ignored(ids):
    return torch.where(ids == 1, -100, ids)


CASES: dict[str, Case] = {
    "softmax": Case(lambda z: torch.softmax(z, -1), [Z], "S2"),
    "log_softmax": Case(lambda z: torch.log_softmax(z, 2), [Z], "S2"),
    "softmax of another dimension": Case(lambda z: torch.softmax(z, 1), [Z], "S2"),
    "softmax, vocabulary in the middle": Case(lambda z: torch.softmax(z.transpose(1, 2), 1), [Z], "S1"),
    "logsumexp": Case(lambda z: torch.logsumexp(z, -1), [Z], "R"),
    "logsumexp, kept": Case(lambda z: z - torch.logsumexp(z, 2, keepdim=True), [Z], "S2"),
    "logsumexp of all": Case(lambda z: torch.logsumexp(z, (1, 2)), [Z], "refuse: another dimension together"),
    "gather": Case(lambda z, i: z.gather(-1, i), [Z, TOP], "P"),
    "log-probability": Case(lambda z, i: torch.log_softmax(z, -1).gather(-1, i[..., None])[..., 0], [Z, IDS], "R"),
    "argmax": Case(lambda z: z.argmax(-1), [Z], "R"),
    "argmax, kept": Case(lambda z: z.argmax(2, keepdim=True), [Z], "R"),
    "argmax of ties": Case(lambda z: (z * 0).argmax(-1), [Z], "R"),
    "argmax of all": Case(lambda z: z.argmax(), [Z], "refuse: all dimensions at once"),
    "max": Case(lambda z: z.max(-1), [Z], "R"),
    "max, kept": Case(lambda z: z.max(2, keepdim=True), [Z], "R"),
    "amax": Case(lambda z: z.amax(-1), [Z], "R"),
    "top 3": Case(lambda z: z.topk(3, dim=-1), [Z], "R"),
    "smallest 3": Case(lambda z: z.topk(3, dim=-1, largest=False), [Z], "refuse: smallest columns"),
    "sum and mean": Case(lambda z: torch.tanh(z).sum(-1) + z.mean(-1), [Z], "R"),
    "entropy": Case(entropy, [Z], "R"),
    "entropy of logits": Case(lambda z: torch.logsumexp(z, -1) - (torch.softmax(z, -1) * z).sum(-1), [Z], "R"),
    "kl of a whole teacher": Case(
        lambda z, t: F.kl_div(torch.log_softmax(z, -1), torch.log_softmax(t, -1), reduction="sum", log_target=True),
        [Z, TEACHER],
        "P",
    ),
    "kl, batchmean": Case(
        lambda z, t: F.kl_div(torch.log_softmax(z, -1), torch.softmax(t, -1), reduction="batchmean"),
        [Z, TEACHER],
        "R",
    ),
    "jsd": Case(generalised_jsd, [Z, Z], "R"),
    "cross entropy": Case(lambda z, i: F.cross_entropy(z, ignored(i)), [FLAT, FLAT_IDS], "R"),
    "cross entropy, sum": Case(lambda z, i: F.cross_entropy(z, i, reduction="sum"), [FLAT, FLAT_IDS], "R"),
    "cross entropy, none": Case(lambda z, i: F.cross_entropy(z, ignored(i), reduction="none"), [FLAT, FLAT_IDS], "R"),
    "cross entropy, smoothed": Case(
        lambda z, i: F.cross_entropy(z, ignored(i), label_smoothing=0.2), [FLAT, FLAT_IDS], "R"
    ),
    "cross entropy, class weights": Case(
        lambda z, i, w: F.cross_entropy(z, ignored(i), weight=w), [FLAT, FLAT_IDS, WEIGHTS], "R"
    ),
    "cross entropy, both": Case(
        lambda z, i, w: F.cross_entropy(z, i, weight=w, label_smoothing=0.1),
        [FLAT, FLAT_IDS, WEIGHTS],
        "refuse: class weights together with label smoothing",
    ),
    "cross entropy, classes second": Case(lambda z, i: F.cross_entropy(z.transpose(1, 2), i), [Z, IDS], "R"),
    "cross entropy, probabilities": Case(
        lambda z, t: F.cross_entropy(z, t, label_smoothing=0.1), [FLAT, Input("probability", (6, "S"))], "R"
    ),
    "cross entropy, weighted probabilities": Case(
        lambda z, t, w: F.cross_entropy(z, t, weight=w, reduction="sum"),
        [FLAT, Input("probability", (6, "S")), WEIGHTS],
        "R",
    ),
    "nll": Case(lambda z, i: F.nll_loss(torch.log_softmax(z, -1), ignored(i)), [FLAT, FLAT_IDS], "R"),
    "nll, class weights": Case(
        lambda z, i, w: F.nll_loss(torch.log_softmax(z, -1), i, weight=w), [FLAT, FLAT_IDS, WEIGHTS], "R"
    ),
    "a padded vocabulary is cut off": Case(
        lambda z, i: F.cross_entropy(z[..., :-1].flatten(0, 1), i.flatten().clamp(max=3)), [Z, IDS], "R"
    ),
    "ids of a window": Case(lambda z: z[..., 1:-1].argmax(-1), [Z], "R"),
    "flattened with tokens": Case(lambda z: torch.log_softmax(z.flatten(1), -1), [Z], "refuse: flattened"),
    "soft cap and scale": Case(lambda z: torch.logsumexp(3 * torch.tanh(z / 3) / 0.7, -1), [Z], "R"),
    "shifted rows": Case(
        lambda z, i: F.cross_entropy(z[:, :-1].reshape(-1, z.shape[-1]), i[:, 1:].reshape(-1)), [Z, IDS], "R"
    ),
    "sort": Case(lambda z: z.sort(-1).values, [Z], "refuse: "),
    "one id": Case(lambda z: z[..., 2], [Z], "P"),
    "a mask over the vocabulary": Case(
        lambda z, w: torch.log_softmax(z.masked_fill(w < 0.0, -1e9), -1).sum(),
        [Z, Input("float", ("S",), grad=False)],
        "P",
    ),
    "a whole bias": Case(lambda z, b: torch.logsumexp(z + b, -1), [Z, Input("float", ("S",))], "R"),
    "a scale for each row": Case(lambda z, s: torch.logsumexp(z * s, -1), [Z, Input("float", (2, 3, 1))], "R"),
}
LENGTHS = [8, 7, 5]


@pytest.fixture(scope="module")
def found(ranks: Any) -> list[dict[tuple[str, int], Found | str]]:
    return ranks.run(run_cases, "test_vocab_rules", list(CASES), LENGTHS, axis_name="tp", world_size=4, timeout=240)


@pytest.mark.parametrize("name", CASES)
def test_rule(found: Any, name: str) -> None:
    expected = CASES[name].expect
    for length in LENGTHS:
        for one in (result[name, length] for result in found):
            assert isinstance(one, Found), one
            if expected.startswith("refuse: "):
                assert one.layout == "refused" and expected.removeprefix("refuse: ") in one.refused
                continue
            assert one.layout == expected, (length, one.layout, one.refused)
            assert one.output_error < 1e-10, (length, one.output_error)
            assert one.gradient_error < 1e-10, (length, one.gradient_error, one.where)


def gathered_cases(rank_info: Any, names: list[str]) -> dict[tuple[str, int], Found | str]:
    return run_cases(rank_info, "test_vocab_rules", names, [7], unsupported="gather", axis_name="tp")


def test_what_is_refused_is_right_when_gathered(ranks: Any) -> None:
    names = [name for name, case in CASES.items() if case.expect.startswith("refuse: ")]
    for result in ranks.run(gathered_cases, names, world_size=2):
        for name in names:
            one = result[name, 7]
            assert isinstance(one, Found), one
            assert one.layout == "R" and one.output_error < 1e-10 and one.gradient_error < 1e-10, name


def test_ids_that_nobody_has_are_nan(ranks: Any) -> None:
    for value in ranks.run(read_nobody, world_size=2):
        assert value != value


def read_nobody(rank_info: Any) -> float:
    import autosp
    from autosp import backend  # noqa: F401
    from autosp.layout.rules.vocabulary import Columns, read_ids

    state = autosp.initialize({})
    axis = Axis("tp", 2, state.sp_rank, state.sp_group)
    columns = Columns(0, 3, 3 * state.sp_rank, 6)
    x = torch.randn(1, 3)
    return read_ids(axis, x, torch.tensor([[6]]), Shard(1, 6, 6), columns).item()


def test_columns_of_windows() -> None:
    parts = [own_columns(Axis("tp", 4, rank, "g"), Shard(1, 10, 6, start=1)) for rank in range(4)]
    # Blocks of 3: positions 0-2, 3-5, 6-8, 9; the window is [1, 7).
    assert [(part.offset, part.count, part.first) for part in parts] == [(1, 2, 0), (0, 3, 2), (0, 1, 5), (0, 0, 6)]
    with pytest.raises(Refusal, match="flattened"):
        own_columns(Axis("tp", 2, 0, "g"), Shard(0, 4, 4, outer=3))
