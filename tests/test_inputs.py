"""prepare_autosp_inputs, prepare_batch, tags and recognition by name; one test for every refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosp.errors import InputError
from autosp.inputs import prepare_autosp_inputs, prepare_batch, read_tag, recognise


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.long)


def dynamic(tensor: torch.Tensor) -> set[int]:
    return set(getattr(tensor, "_dynamo_weak_dynamic_indices", ()))


def tagged(key: str, tensor: torch.Tensor, **more: Any) -> tuple[Any, set[int]]:
    prepare_batch({"input_ids": ids(2, 8), key: tensor}, **more)
    return read_tag(tensor), dynamic(tensor)


def test_the_four_come_back_in_order_tagged_and_dynamic() -> None:
    given = ids(2, 8), ids(2, 8), ids(1, 8), ids(2, 8)
    returned = prepare_autosp_inputs(*given)
    assert len(returned) == 4 and all(a is b for a, b in zip(returned, given, strict=True))
    assert [tensor.tag for tensor in given] == [
        ("input_ids", 1),
        ("labels", 1),
        ("position_ids", 1),
        ("attention_mask", 1),
    ]
    assert all(dynamic(tensor) == {1} for tensor in given)


def test_missing_ones_stay_none_and_more_comes_as_a_dict() -> None:
    tokens, shifted = ids(2, 8), ids(2, 8)
    first, label, position, mask, more = prepare_autosp_inputs(tokens, shift_labels=shifted, inputs_embeds=None)
    assert first is tokens and label is position is mask is None
    assert more == {"shift_labels": shifted, "inputs_embeds": None}
    assert shifted.tag == ("shift_labels", 1)


def test_embeddings_in_place_of_ids() -> None:
    embeds, labels = torch.zeros(2, 8, 4), ids(2, 8)
    prepare_autosp_inputs(None, labels, inputs_embeds=embeds)
    assert (embeds.tag, labels.tag, dynamic(embeds)) == (("inputs_embeds", 1), ("labels", 1), {1})


@pytest.mark.parametrize(
    ("key", "shape", "dim", "marked"),
    [
        ("labels", (2, 8), 1, {1}),
        ("shift_labels", (2, 8), 1, {1}),
        ("token_type_ids", (2, 8), 1, {1}),
        ("position_ids", (8,), 0, {0}),
        ("position_ids", (1, 8), 1, {1}),
        ("position_ids", (3, 2, 8), 2, {2}),
        ("attention_mask", (2, 8), 1, {1}),
        ("attention_mask", (2, 8, 8), 2, {1, 2}),
        ("attention_mask", (2, 1, 8, 8), 3, {2, 3}),
        ("attention_mask", (2, 1, 1, 8), 3, {3}),
        ("inputs_embeds", (2, 8, 4), 1, {1}),
    ],
)
def test_the_default_follows_what_the_tensor_is(key: str, shape: tuple[int, ...], dim: int, marked: set[int]) -> None:
    assert tagged(key, torch.zeros(shape)) == ((key, dim), marked)
    assert recognise(key, len(shape)) == (key, dim)


@pytest.mark.parametrize(
    ("key", "shape", "dim"),
    [
        ("labels", (8, 2), 0),
        ("position_ids", (8,), 0),
        ("position_ids", (8, 1), 0),
        ("position_ids", (3, 8, 2), 1),
        ("attention_mask", (8, 2), 0),
        ("attention_mask", (2, 1, 8, 8), 3),
        ("inputs_embeds", (8, 2, 4), 0),
    ],
)
@pytest.mark.parametrize("seq_dim", [0, -2])
def test_sequence_first(key: str, shape: tuple[int, ...], dim: int, seq_dim: int) -> None:
    tokens, tensor = ids(8, 2), torch.zeros(shape)
    prepare_batch({"input_ids": tokens, key: tensor}, seq_dim=seq_dim)
    assert (tokens.tag, tensor.tag) == (("input_ids", 0), (key, dim))


def test_minus_one_is_the_last_dimension_of_the_ids_not_of_embeddings() -> None:
    assert tagged("inputs_embeds", torch.zeros(2, 8, 4), seq_dim=-1) == (("inputs_embeds", 1), {1})


def test_a_mapping_is_literal_takes_both_spellings_and_defaults_to_one() -> None:
    tokens, labels, position = ids(2, 8), ids(8, 2), ids(2, 8)
    prepare_autosp_inputs(tokens, labels, position, seq_dim={"label_id": -2, "position_ids": 1})
    assert (tokens.tag, labels.tag, position.tag) == (("input_ids", 1), ("labels", 0), ("position_ids", 1))


def test_none_in_a_mapping_leaves_a_tensor_alone() -> None:
    assert tagged("labels", ids(2), seq_dim={"labels": None}) == (None, set())


def test_a_mapping_tags_inputs_of_other_names() -> None:
    assert tagged("audio", torch.zeros(2, 4, 8), seq_dim={"audio": 2}) == (("audio", 2), {2})
    audio = torch.zeros(2, 8)
    prepare_autosp_inputs(ids(2, 8), audio=audio)
    assert audio.tag == ("audio", 1)


@pytest.mark.parametrize("length", [0, 1])
def test_lengths_that_torch_specialises_are_tagged_and_not_marked(length: int) -> None:
    assert tagged("labels", ids(2, length)) == (("labels", 1), set())


def test_one_tensor_as_ids_and_labels_keeps_the_ids_tag() -> None:
    tokens = ids(2, 8)
    prepare_autosp_inputs(tokens, tokens)
    assert tokens.tag == ("input_ids", 1)


def test_a_batch_passes_everything_on() -> None:
    batch = {"input_id": ids(2, 8), "labels": None, "use_cache": False, "pixels": torch.zeros(3)}
    prepared = prepare_batch(batch)
    assert prepared == batch and prepared is not batch
    assert read_tag(prepared["pixels"]) is None
    assert read_tag(prepared["input_id"]) == ("input_ids", 1)


@pytest.mark.parametrize(
    ("batch", "seq_dim", "message"),
    [
        ([ids(2, 8)], 1, "a batch is a mapping from argument names to tensors, not list"),
        ({"labels": ids(2, 8)}, 1, r"neither input_ids nor inputs_embeds; its keys: \['labels'\]"),
        ({"input_ids": [[1, 2]]}, 1, "input_ids is a list; a torch.Tensor is expected"),
        ({"input_ids": ids(8)}, 1, r"seq_dim is 1, but input_ids has shape \(8,\)"),
        ({"input_ids": ids(2, 8)}, 2, "seq_dim is 2, but input_ids has shape"),
        ({"input_ids": ids(2, 8)}, -3, "seq_dim is -3"),
        ({"input_ids": ids(2, 8)}, True, "the sequence dimension of seq_dim is True; an int is expected"),
        ({"input_ids": ids(2, 8)}, {"input_ids": "1"}, "the sequence dimension of input_ids is '1'"),
        ({"input_ids": ids(2, 8)}, {"label": 1}, r"seq_dim names \['label'\], which are not among the inputs"),
        ({"input_ids": ids(2, 8)}, {"input_ids": 2}, r"input_ids has shape \(2, 8\) and no dimension 2"),
        ({"input_ids": ids(2, 8), "labels": ids(2)}, 1, "labels has shape .*seq_dim={'labels': dimension}, or None"),
        (
            {"input_ids": ids(2, 8), "position_ids": ids(1, 1, 2, 8)},
            1,
            "position_ids has shape .*one more dimension in front",
        ),
        ({"input_ids": ids(2, 8), "attention_mask": ids(8)}, 1, "attention_mask has shape"),
        ({"input_ids": ids(2, 8), "inputs_embeds": ids(2, 8)}, 1, "inputs_embeds has shape"),
        ({"input_ids": ids(2, 8), "input_id": ids(2, 8)}, 1, "'input_ids' twice"),
    ],
)
def test_refusals_of_a_batch(batch: Any, seq_dim: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare_batch(batch, seq_dim)
    if isinstance(batch, dict):
        assert all(read_tag(value) is None and not dynamic(value) for value in batch.values() if torch.is_tensor(value))


def test_refusals_of_the_four() -> None:
    with pytest.raises(InputError, match="no token ids: give input_id, or inputs_embeds by name"):
        prepare_autosp_inputs(None, ids(2, 8))
    with pytest.raises(InputError, match="'labels' is given twice"):
        prepare_autosp_inputs(ids(2, 8), ids(2, 8), labels=ids(2, 8))
    with pytest.raises(InputError, match="audio has shape .* and no dimension 1"):
        prepare_autosp_inputs(ids(2, 8), audio=torch.zeros(8))
    same = ids(8, 8)
    with pytest.raises(InputError, match="input_ids and labels are one tensor, with sequence dimensions 1 and 0"):
        prepare_autosp_inputs(same, same, seq_dim={"labels": 0})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"tag": ("input_id", 0)}, ("input_ids", 0)),
        ({"tag": "label_id"}, ("labels", 1)),
        ({"tag": ["position_id", 2]}, ("position_ids", 2)),
        ({}, None),
        ({"tag": 3}, None),
        ({"tag": ("input_ids", "1")}, None),
        (torch.zeros(2), None),
        (None, None),
    ],
)
def test_read_tag(source: object, expected: tuple[str, int] | None) -> None:
    assert read_tag(source) == expected


def test_read_tag_counts_negative_dimensions_from_the_end() -> None:
    tensor = torch.zeros(2, 8, 4)
    tensor.tag = ("inputs_embeds", -2)
    assert read_tag(tensor) == ("inputs_embeds", 1)
    assert read_tag({"tag": ("labels", -1)}, ndim=2) == ("labels", 1)


@pytest.mark.parametrize(
    ("name", "ndim", "expected"),
    [
        ("L_input_ids_", 2, ("input_ids", 1)),
        ("l_kwargs_position_ids_", 2, ("position_ids", 1)),
        ("L_batch_labels_", 2, ("labels", 1)),
        ("L_decoder_input_ids_", 2, None),
        ("L_self_modules_labels_", 2, None),
        ("L_x_", 2, None),
        ("s0", 0, None),
        ("labels", 1, None),
        ("input_ids", 1, None),
    ],
)
def test_recognise(name: str, ndim: int, expected: tuple[str, int] | None) -> None:
    assert recognise(name, ndim) == expected


def test_tags_and_dynamic_dimensions_reach_a_graph() -> None:
    found: dict[str, Any] = {}
    compilations = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        compilations.append(gm)
        for node in gm.graph.find_nodes(op="placeholder"):
            if tag := read_tag(node.meta.get("tensor_dict")):
                found[str(node.target)] = tag
        return gm

    def model(input_ids: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return input_ids + kwargs["position_ids"]

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for length in (8, 12, 16):
        compiled(**prepare_batch({"input_ids": ids(2, length), "position_ids": torch.arange(length)}))
    assert sorted(found.values()) == [("input_ids", 1), ("position_ids", 0)]
    assert all(recognise(name, 2) for name in found)
    assert len(compilations) == 1
