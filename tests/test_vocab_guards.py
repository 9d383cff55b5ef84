"""What computes over all parameters of a rank, or takes ranks for replicas, beside a vocabulary-parallel head."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
from pool import RankPool
from test_vocab_head import head_config, rows
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm  # names that are here before anything is sharded

import autosp
from autosp.errors import InputError, InternalError
from autosp.layers.optimizers import check_optimizer


def pair(tied: bool = False, vocab: int = 49, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A model with a sharded head and the dense one, with the same random gradients."""
    model = toys.build(tied=tied, vocab=vocab).to(dtype)
    reference = copy.deepcopy(model)
    extra = {"vocab_parallel_embedding": True} if tied else {}
    autosp.initialize(head_config(dist.get_world_size(), **extra), model=model)
    return model, reference


def own_rows(model: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    layer = model.get_submodule(name.rpartition(".")[0])
    return rows(layer, whole) if hasattr(layer, "partition") else whole


def fill(model: nn.Module, reference: nn.Module) -> None:
    torch.manual_seed(0)
    for name, whole in reference.named_parameters():
        whole.grad = torch.randn_like(whole)
        model.get_parameter(name).grad = own_rows(model, name, whole.grad).clone()


def alike(model: nn.Module, reference: nn.Module) -> None:
    for name, whole in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, own_rows(model, name, whole.grad))


def clips(rank_info: Any) -> list[torch.Tensor]:
    norms = []
    for tied, vocab in ((False, 49), (True, 5)):  # five ids on four ranks: one has none
        model, reference = pair(tied, vocab)
        for clip, parameters, settings in (
            *((clip_grad_norm_, lambda m: m.parameters(), {"norm_type": p}) for p in (2.0, 3.0, float("inf"), 0.0)),
            (torch.nn.utils.clip_grad_norm_, lambda m: list(m.parameters()), {"foreach": False}),
            (torch.nn.utils.clip_grad_norm_, lambda m: [*m.parameters()][::-1], {"error_if_nonfinite": True}),
            (torch.nn.utils.clip_grad_norm_, lambda m: m.head.weight, {}),
        ):
            fill(model, reference)
            expected = clip(parameters(reference), 0.5, **settings)
            found = clip(parameters(model), 0.5, **settings)
            torch.testing.assert_close(found, expected)
            alike(model, reference)
            norms.append(found)
        fill(model, reference)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(autosp.clip_grad_norm_(model, 0.5), expected)
        alike(model, reference)
    return norms


def test_torchs_clipping_counts_every_row_once(ranks: RankPool) -> None:
    first, *others = ranks.run(clips, world_size=4)
    assert all(torch.equal(torch.stack(first), torch.stack(other)) for other in others)


def total_norms(rank_info: Any) -> None:
    model, reference = pair()
    fill(model, reference)
    expected = get_total_norm([p.grad for p in reference.parameters()])
    for grads in (
        [p.grad for p in model.parameters()],
        (p.grad for p in model.parameters()),
        [p.grad.detach() for p in model.parameters()],
        [p.grad.data for p in model.parameters()],
    ):
        torch.testing.assert_close(get_total_norm(grads), expected)
        # What knows nothing of the head goes on as it is.
    others = [p.grad for name, p in model.named_parameters() if not name.startswith("head")]
    assert torch.equal(get_total_norm(others), torch.linalg.vector_norm(torch.stack([g.norm() for g in others])))
    assert get_total_norm([]) == 0
    # A copy, a moved layer and a parameter put in place of another are known too.
    copied = copy.deepcopy(model).double()
    copied.head.weight = nn.Parameter(copied.head.weight.detach().clone())
    fill(copied, reference.double())
    found = clip_grad_norm_(copied.parameters(), 0.5)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, clip_grad_norm_(reference.parameters(), 0.5))
    alike(copied, reference)
    half, wide = pair(dtype=torch.bfloat16)
    fill(half, wide)
    found = clip_grad_norm_(half.parameters(), 0.5)
    torch.testing.assert_close(found.float(), clip_grad_norm_(wide.parameters(), 0.5).float(), rtol=1e-2, atol=0)
    if rank_info.rank == 0:
        model.head.weight.grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)


def test_norms_of_gradients(ranks: RankPool) -> None:
    ranks.run(total_norms, world_size=2)


def test_a_torch_that_is_made_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from autosp.layers import clip

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda tensors: tensors)
    with pytest.raises(InternalError, match="is not made as autosp knows it"):
        clip.install()


def accelerated(rank_info: Any) -> None:
    from accelerate import Accelerator

    model, reference = pair()
    fill(model, reference)
    expected = clip_grad_norm_(reference.parameters(), 0.5)
    torch.testing.assert_close(Accelerator(cpu=True).clip_grad_norm_(model.parameters(), 0.5), expected)
    alike(model, reference)


def test_accelerates_clipping(ranks: RankPool) -> None:
    ranks.run(accelerated, world_size=2)


class Lamb(torch.optim.Optimizer):
    """The trust ratio of LAMB, without its moments."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * (p.norm() / p.grad.norm()), alpha=-group["lr"])


class Lion(Lamb):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-group["lr"])


class Strange(Lion):
    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)


def optimizers(rank_info: Any) -> None:
    import transformers

    model, reference = pair()
    fill(model, reference)
    head, others = list(model.head.parameters()), list(model.attention.parameters())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    before = {name: value.clone() for name, value in model.named_parameters()}
    for optimizer in (
        Lamb(model.parameters(), lr=1e-9),
        torch.optim.Adafactor(model.parameters()),
        transformers.Adafactor(model.parameters()),
        torch.optim.Muon(matrices),
        torch.optim.LBFGS(model.parameters()),
        Lamb([{"params": others}, {"params": head}]),
    ):
        with pytest.raises(InputError, match=f"^{type(optimizer).__name__} updates a row by what is in others"):
            optimizer.step(lambda: torch.ones(()))
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    for optimizer in (
        Lion(model.parameters()),
        Lamb(others),
        torch.optim.AdamW(model.parameters(), fused=True),
        torch.optim.SGD(model.parameters(), momentum=0.9),
    ):
        optimizer.step()
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop):
        # The list of those that are not tried, tried: a subclass of each is not on it.
        check_optimizer(type(kind.__name__, (kind,), {})(model.parameters(), lr=0.01))
    with pytest.warns(UserWarning, match="Strange cannot be tried on small tensors"):
        Strange(model.parameters(), model).step()


def test_optimizers_that_mix_rows_are_refused(ranks: RankPool) -> None:
    ranks.run(optimizers, world_size=2)


def compiled_steps(rank_info: Any) -> None:
    model, reference = pair()
    fill(model, reference)
    other = torch.optim.AdamW(reference.parameters(), lr=0.1)
    optimizer, mixing = torch.optim.AdamW(model.parameters(), lr=0.1), Lamb(model.parameters())
    step, mixing_step = (torch.compile(each.step, backend="eager") for each in (optimizer, mixing))
    with pytest.raises(InputError, match="Lamb updates a row by what is in others"):
        mixing_step()
    for _ in range(2):
        step()
        other.step()
    for name, whole in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), own_rows(model, name, whole))
    clip = torch.compile(clip_grad_norm_, backend="eager")
    torch.testing.assert_close(clip([*model.parameters()], 0.5), clip_grad_norm_(reference.parameters(), 0.5))
    alike(model, reference)


@pytest.mark.slow
def test_compiled_steps_and_clipping(ranks: RankPool) -> None:
    ranks.run(compiled_steps, world_size=2)


def early(rank_info: Any) -> None:
    model = toys.build(tied=True)
    optimizer, others = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.attention.parameters())
    autosp.initialize(head_config(2, vocab_parallel_embedding=True), model=model)
    with pytest.raises(InputError, match="this AdamW holds the whole LM head that the model had before it was sharded"):
        optimizer.step()
    others.step()
    later = torch.optim.AdamW(model.attention.parameters())
    later.step()
    later.add_param_group({"params": [model.head.weight]})
    later.step()
    mixing = Lamb(model.attention.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    mixing.step()
    mixing.add_param_group({"params": [model.head.weight]})
    with pytest.raises(InputError, match="Lamb updates a row by what is in others"):
        mixing.step()


def test_an_optimizer_of_the_whole_head_is_refused(ranks: RankPool) -> None:
    ranks.run(early, world_size=2)


def scaled(rank_info: Any) -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model, reference = pair()
    fill(model, reference)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.head.weight.detach().clone()
    plain, shared = torch.amp.GradScaler("cpu"), ShardedGradScaler("cpu")
    for scaler in (plain, shared):
        scaler.scale(torch.ones(()))  # as a loss would be
    with pytest.raises(InputError, match="a GradScaler looks for infinities in a rank's own gradients"):
        plain.step(optimizer)
    assert torch.equal(before, model.head.weight)
    fill(model, reference)
    shared.step(optimizer)
    assert not torch.equal(before, model.head.weight)
    others = torch.optim.SGD(toys.build().parameters(), lr=0.1)  # no sharded head, no concern of ours
    other = torch.amp.GradScaler("cpu")
    other.scale(torch.ones(()))
    others.param_groups[0]["params"][0].grad = torch.ones_like(others.param_groups[0]["params"][0])
    other.step(others)


def test_a_scaler_of_one_rank_is_refused(ranks: RankPool) -> None:
    ranks.run(scaled, world_size=2)


def engines(rank_info: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model, _ = pair()
    mesh = autosp.mesh.current().mesh
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(InputError, match=r"^DistributedDataParallel over ranks \[0, 1\] would average"):
        nn.parallel.DistributedDataParallel(model)
    with pytest.raises(InputError, match=r"^FullyShardedDataParallel over ranks \[0, 1\] would average"):
        FullyShardedDataParallel(copy.deepcopy(model), device_id=torch.device("cpu"))
    with pytest.raises(InputError, match=r"^weight as a DTensor over ranks \[0, 1\] would average"):
        fully_shard(copy.deepcopy(model), mesh=mesh["tp"])
    with pytest.raises(InputError, match="DeepSpeed's engine gives every rank the parameters of rank 0"):
        model.head.set_deepspeed_parallelism(False)
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    # Over ranks with one tp coordinate all of them are right.
    batch = toys.batch(9)
    model.head.output = "full"
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model), process_group=mesh.get_group("dp"))
    nn.parallel.DistributedDataParallel(toys.build())  # no sharded head, no concern of ours
    sharded = fully_shard(copy.deepcopy(model), mesh=mesh["dp"])
    grads = []
    for each in (model, wrapped.module, sharded):
        (wrapped if each is wrapped.module else each)(**batch).loss.backward()
        grads.append([getattr(p.grad, "_local_tensor", p.grad) for p in each.parameters() if p.grad is not None])
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_engines_that_would_mix_rows_are_refused(ranks: RankPool) -> None:
    ranks.run(engines, world_size=2)


def deepspeeds_engine(rank_info: Any) -> None:
    import deepspeed

    model, _ = pair()
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(InputError, match="DeepSpeed's engine gives every rank the parameters of rank 0"):
        deepspeed.initialize(model=model, config=settings)


@pytest.mark.slow
def test_deepspeeds_engine_is_refused(ranks: RankPool) -> None:
    ranks.run(deepspeeds_engine, world_size=2)
