"""What a reader of a page has when a Python block begins, and what must be so when it has run.

A scene is a page's: a function that runs each Python block of it, as it stands, in a rank process, and looks at what
the block left behind. `Page.run` gives a block names that the text takes for granted (`model`, `batch`); later blocks
of the page see what earlier ones made, where the scene does not call `Page.forget`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import doc_pages
import kernel_attention
import parity
import torch
import torch.distributed as dist
import toys
import zoo
from pool import RankInfo
from torch import nn
from torch.nn import functional as F

import autosp

RTOL = 1e-5
LENGTH = 17


class Page:
    """A page while its blocks run: what they share, and which have run."""

    def __init__(self, name: str, rank_info: RankInfo) -> None:
        self.name, self.rank_info = name, rank_info
        self.blocks = doc_pages.python_blocks(name)
        self.done: list[int] = []
        self.forget()

    def forget(self) -> None:
        """The next block builds on nothing."""
        self.space: dict[str, Any] = {"__name__": "block_of_a_page"}

    def run(self, number: int, **given: Any) -> dict[str, Any]:
        """Run block `number` with these names besides; what is there afterwards."""
        self.space.update(given)
        exec(compile(self.blocks[number].text, f"{self.name} block {number}", "exec"), self.space)
        self.done.append(number)
        return self.space


Scene = Callable[[Page], None]
SCENES: dict[str, tuple[Scene, int]] = {}


def scene(page: str, world_size: int = 2) -> Callable[[Scene], Scene]:
    """The decorated function is the scene of a page, on so many ranks."""

    def keep(function: Scene) -> Scene:
        SCENES[page] = (function, world_size)
        return function

    return keep


def play(rank_info: RankInfo, name: str, folder: str) -> list[int]:
    """Body of a rank: run a page's blocks in `folder`; the numbers of those that ran."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        page = Page(name, rank_info)
        SCENES[name][0](page)
    finally:
        os.chdir(before)
    return page.done


def write_config(rank_info: RankInfo, content: dict[str, Any]) -> None:
    """``ds_config.json`` in the current folder."""
    file = f"ds_config-{rank_info.rank}.json"
    with open(file, "w", encoding="utf-8") as out:
        json.dump({**content, "autosp": {"inner_backend": parity.INNER, **content.get("autosp", {})}}, out)
    os.replace(file, "ds_config.json")  # ranks share the folder


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert parity.error(found.detach(), expected.detach()) <= RTOL, (found, expected)


def same_gradients(found: nn.Module, expected: nn.Module) -> None:
    got, wanted = parity.gradients(found), parity.gradients(expected)
    assert wanted and set(got) == set(wanted)
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert parity.error(got[name], gradient, 1e-3 * largest) <= RTOL, name


def three_lines(page: Page, number: int) -> tuple[nn.Module, nn.Module]:
    """The few lines of a training script that pages begin with; the model that they trained and its reference."""
    model, whole, batch = toys.build(), toys.build(), toys.batch(LENGTH)
    write_config(page.rank_info, {"sequence_parallel_size": 2})
    expected = whole(**batch).loss
    expected.backward()
    space = page.run(number, model=model, batch=batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert autosp.mesh.current().sizes["sp"] == 2  # type: ignore[attr-defined]
    close(space["loss"], expected)
    return model, whole


@scene("README.md")
def readme(page: Page) -> None:
    model, whole = three_lines(page, 0)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    for (name, found), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert parity.error(found.detach(), expected.detach()) <= RTOL, name
    same_gradients(model, whole)
    page.forget()
    head_and_loss(page, 1)


def head_and_loss(page: Page, number: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden, lm_head = torch.randn(2, 8, 16, requires_grad=True), nn.Linear(16, 48, bias=False)
    labels = torch.randint(48, (2, 8))
    loss = page.run(number, hidden=hidden, lm_head=lm_head, labels=labels)["loss"]
    expected = F.cross_entropy(lm_head(hidden).flatten(0, 1), labels.flatten())
    close(loss, expected)
    return (hidden, lm_head.weight, *torch.autograd.grad(expected, [hidden, lm_head.weight]))


@scene("docs/index.md")
def quick_start(page: Page) -> None:
    model, whole = three_lines(page, 0)
    page.space["loss"].backward()
    same_gradients(model, whole)
    page.forget()
    space = page.run(1)
    assert space["state"].sp_size == 2
    whole = type(space["model"])()
    whole.load_state_dict(space["model"].state_dict())
    whole(**space["batch"]).backward()
    same_gradients(space["model"], whole)


@scene("docs/linear_loss.md")
def fused_head(page: Page) -> None:
    hidden, weight, *expected = head_and_loss(page, 0)
    for tensor, gradient in zip((hidden, weight), expected, strict=True):
        close(tensor.grad, gradient)
    page.forget()
    page.run(1, autosp=autosp)
    model, whole, batch = toys.build(), toys.build(), toys.batch(LENGTH)
    compiled = torch.compile(model, backend="autosp", options={"inner_backend": parity.INNER})
    out, reference = compiled(**autosp.prepare_batch(batch)), whole(**batch)
    assert out.logits is None
    close(out.loss, reference.loss)
    out.loss.backward()
    reference.loss.backward()
    same_gradients(model, whole)


@scene("docs/passes.md")
def model_of_the_passes(page: Page) -> None:
    kind = page.run(0)["Model"]
    torch.manual_seed(0)
    model, ids = kind(), torch.randint(64, (2, LENGTH))
    batch = {"input_ids": ids, "labels": ids.clone()}
    autosp.initialize(parity.CASE)
    compiled = torch.compile(model, backend="autosp")
    parity.compare(model, compiled, batch, prepare=autosp.prepare_batch, loss_of=lambda out: out).check()


@scene("docs/tools.md")
def check_in_a_script(page: Page) -> None:
    autosp.initialize(parity.CASE)
    model = toys.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = page.run(0, autosp=autosp, model=model, batch=toys.batch(LENGTH))["result"]
    assert result.verdict == "ok" and result.steps == 2 and result.compilations == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@scene("docs/vocab_parallel.md")
def losses_of_logits(page: Page) -> None:
    rank, ranks, vocabulary = page.rank_info.rank, page.rank_info.world_size, 32
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 9, vocabulary), torch.randint(vocabulary, (2, 9))
    losses: list[torch.Tensor] = []
    functions = {name: getattr(autosp, name) for name in ("vocab_parallel_cross_entropy", "vocab_parallel_token_stats")}

    def kept(*arguments: Any, **more: Any) -> torch.Tensor:
        losses.append(functions["vocab_parallel_cross_entropy"](*arguments, **more))
        return losses[-1]

    # The block calls it twice under one name; both results are of interest.
    module = sys.modules["autosp"]
    module.vocab_parallel_cross_entropy = kept  # type: ignore[attr-defined]
    try:
        space = page.run(
            0, logits=logits, labels=labels, actions=labels, tp_group=dist.group.WORLD,
            local_logits=logits.chunk(ranks, -1)[rank],
        )  # fmt: skip
    finally:
        module.vocab_parallel_cross_entropy = functions["vocab_parallel_cross_entropy"]  # type: ignore[attr-defined]
    shifted, whole = losses
    close(shifted, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
    close(whole, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    logp, stats = logits.log_softmax(-1), space["stats"]
    close(stats.logprob, logp.gather(-1, labels[..., None])[..., 0])
    close(stats.entropy, -(logp.exp() * logp).sum(-1))
    close(stats.lse, logits.logsumexp(-1))
    assert torch.equal(stats.is_argmax, labels == logits.argmax(-1))


@scene("docs/vocab_parallel_lm_head.md", world_size=4)
def sharded_head(page: Page) -> None:
    (config,) = [json.loads(block.text) for block in doc_pages.blocks_of(page.name) if block.info == "json"]
    write_config(page.rank_info, config)
    torch.manual_seed(0)
    model, batch = zoo.llama(num_hidden_layers=1), zoo.batch(LENGTH)
    torch.manual_seed(0)
    whole = zoo.llama(num_hidden_layers=1)
    expected = whole(**batch).loss
    expected.backward()
    weights = {name: value.clone() for name, value in whole.state_dict().items()}
    rows = model.lm_head.weight.shape[0]
    space = page.run(0, model=model, batch=batch)
    assert model.lm_head.weight.shape[0] == rows // 2
    close(space["loss"], expected)
    state = autosp.mesh.current()  # type: ignore[attr-defined]
    mine = slice(rows // 2 * state.coordinates["tp"], rows // 2 * (state.coordinates["tp"] + 1))
    close(model.lm_head.weight.grad, whole.lm_head.weight.grad[mine])
    close(model.model.embed_tokens.weight.grad, whole.model.embed_tokens.weight.grad)
    # the block on checkpoints builds on this one
    page.run(2)
    dist.barrier()
    saved = type(model).from_pretrained("out").state_dict()
    assert set(saved) == set(weights) and all(torch.equal(saved[name], weights[name]) for name in weights)
    head_by_hand(page, state, whole)


def head_by_hand(page: Page, state: Any, whole: Any) -> None:
    page.forget()
    hidden = torch.randn(2, 5, whole.lm_head.weight.shape[1])
    ids = torch.randint(whole.lm_head.weight.shape[0], (2, 5))
    space = page.run(1, model=whole, state=state, hidden=hidden, ids=ids)
    logp = whole.lm_head(hidden).log_softmax(-1)
    close(space["logp"], logp.gather(-1, ids[..., None])[..., 0])
    assert space["logits"].shape[-1] == whole.lm_head.weight.shape[0] // 2


class WithKernel(nn.Module):
    """A layer around the kernels that the page on attention registers."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = toys.build(heads=6, kv_heads=3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, starts: torch.Tensor) -> toys.Out:
        toy, attention = self.toy, self.toy.attention
        x = toy.embed(input_ids)
        q, k, v = (
            layer(x).view(*input_ids.shape, heads, 4)
            for layer, heads in ((attention.q, 6), (attention.k, 3), (attention.v, 3))
        )
        rows, _ = torch.ops.mylib.flash(q, k, v, 0.5)
        packed = torch.ops.mylib.flash_varlen(q[0], k[0], v[0], starts, 0.5)[None]
        logits = toy.head(x + attention.o((rows + packed).reshape(*input_ids.shape, 24)))
        return toys.Out(toys.pad_slice(toy, logits, labels), logits)


@scene("docs/attention.md")
def attention_of_a_library(page: Page) -> None:
    with open(kernel_attention.__file__, encoding="utf-8") as file:
        source = file.read().replace("autosp_test", "mylib")
    exec(compile(source, "mylib.py", "exec"), {"__name__": "mylib"})
    page.run(0)["register"]()
    batch = {**toys.batch(LENGTH, rows=1), "starts": torch.tensor([0, 5, 12])}
    (result,) = parity.run_model(page.rank_info, WithKernel, [batch], config=parity.CASE)
    result.check()


class Here:
    """In the place of the pool of rank processes, in a rank of which a block is run."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info, self.calls = rank_info, 0

    def run(self, function: Callable[..., Any], *arguments: Any, world_size: int) -> None:
        assert world_size == self.rank_info.world_size
        function(self.rank_info, *arguments)
        self.calls += 1


@scene("docs/add_an_operator_rule.md")
def rules(page: Page) -> None:
    from autosp.layout import registry
    from autosp.layout.placement import PARTIAL, REPLICATE

    sys.path.insert(0, str(doc_pages.ROOT / "examples"))
    try:
        import add_operator_rule
    finally:
        sys.path.pop(0)
    targets = [torch.ops.demo.rotate.default, torch.ops.demo.energy.default]
    examples = [registry._RULES.pop(target) for target in targets]
    try:
        page.run(0, autosp=autosp, torch=torch, PARTIAL=PARTIAL, REPLICATE=REPLICATE)
        space = page.run(1)
        assert [registry._RULES[target] for target in targets] == [space["rotate_rule"], space["energy_rule"]]
        here = Here(page.rank_info)
        page.run(2, add_operator_rule=add_operator_rule)["test_it"](here)
        assert here.calls == 1
    finally:
        registry._RULES.update(zip(targets, examples, strict=True))
