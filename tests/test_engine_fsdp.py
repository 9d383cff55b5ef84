"""FSDP2 over data and sequence parallel ranks: steps equal one process, root only and layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_steps
import parity
import pytest
import torch
import torch.distributed as dist
import toys
import zoo
from engine_steps import Run
from pool import RankInfo, RankPool
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import autosp
from autosp.integrations import fsdp
from autosp.layout.axis import Axis
from autosp.runtime import LocalProgram
from autosp.sequence_tensor import shard

SP2 = {"sequence_parallel_size": 2, "autosp": {"inner_backend": "aot_eager"}}


def build(kind: str) -> torch.nn.Module:
    if kind == "toy":
        return toys.build()
    name, _, tied = kind.partition(" ")
    return zoo.build(name, num_hidden_layers=2, use_cache=False, **({"tie_word_embeddings": True} if tied else {}))


def batch_of(kind: str, step: int, micro: int, replica: int) -> engine_steps.Batch:
    seed = 100 * step + 10 * micro + replica
    return toys.batch(17, seed=seed, ignored=0.0) if kind == "toy" else zoo.batch(17, seed=seed)


def sharded(kind: str, model: torch.nn.Module, layered: bool, **settings: Any) -> torch.nn.Module:
    layers = None
    if layered:
        layers = model.transformer.h if kind == "gpt2" else model.model.layers  # type: ignore[union-attr]
    return fsdp.fully_shard(model, layers=layers, shard_embedding=kind != "gpt2", **settings)  # type: ignore[arg-type]


def trained(
    rank_info: RankInfo,
    kind: str,
    layered: bool,
    *,
    clip: float | None = None,
    accumulation: int = 1,
    reduction: str | None = None,
    checkpointing: bool = False,
    offload: bool = False,
) -> tuple[Run, Run, int]:
    state = autosp.initialize(SP2)
    dp = state.coordinates["dp"]
    expected = engine_steps.one_process(
        build(kind),
        replicas=state.sizes["dp"],
        clip=clip,
        accumulation=accumulation,
        batches=lambda *place: batch_of(kind, *place),
    )
    model = build(kind)
    if checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        model.train()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    settings: dict[str, Any] = {"options": {"gradient_reduction": reduction}} if reduction else {}
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = sharded(kind, model, layered, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = Run()
    for step in range(2):
        total = torch.zeros(())
        for micro in range(accumulation):
            model.set_requires_gradient_sync(micro == accumulation - 1)  # type: ignore[operator]
            loss = model(**autosp.prepare_batch(batch_of(kind, step, micro, dp))).loss / accumulation
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        run.losses.append(total.item() / dist.get_world_size())
        if clip is not None:
            run.norms.append(parity.full(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)).item())
        if step == 0:
            run.gradients = {n: parity.full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    run.moved = {n: parity.full(p.detach()) - before[n] for n, p in model.named_parameters()}
    if not layered:
        return run, expected, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    layer = next(module for module in model.modules() if isinstance(module.forward, fsdp._Layer))
    return run, expected, len(_debug_get_cache_entry_list(type(layer).forward.__code__))


@pytest.mark.parametrize(
    # graphs: of the whole model, or of all layers together
    ("kind", "layered", "settings", "graphs", "world_size"),
    [
        ("toy", False, {"clip": 0.1, "accumulation": 2}, 1, 4),
        ("llama", True, {"clip": 0.1}, 1, 2),
        pytest.param("llama tied", True, {"accumulation": 2}, 1, 4, marks=pytest.mark.slow),
        pytest.param("llama", False, {"reduction": "graph", "clip": 0.1}, 1, 2, marks=pytest.mark.slow),
        pytest.param("llama", True, {"reduction": "graph"}, 1, 2, marks=pytest.mark.slow),
        pytest.param("llama", True, {"checkpointing": True}, 1, 2, marks=pytest.mark.slow),
        pytest.param("llama", True, {"offload": True}, 1, 2, marks=pytest.mark.slow),
        pytest.param("gpt2", True, {}, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_two_steps_equal_one_process(
    ranks: RankPool, kind: str, layered: bool, settings: dict[str, Any], graphs: int, world_size: int
) -> None:
    results = ranks.run(trained, kind, layered, world_size=world_size, timeout=300, **settings)
    for run, expected, found in results:
        run.check(expected)
        assert found == graphs


def mixed(rank_info: RankInfo, layered: bool) -> tuple[float, float, float, str]:
    """bf16 computation over fp32 parameters, gradients reduced in fp32."""
    autosp.initialize(SP2)
    plain = build("llama")
    reference = plain(**batch_of("llama", 0, 0, 0)).loss
    reference.backward()
    expected = parity.gradients(plain)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded("llama", build("llama"), layered, mp_policy=policy)
    loss = model(**autosp.prepare_batch(batch_of("llama", 0, 0, 0))).loss
    loss.backward()
    floor = 3e-2 * max(g.abs().max().item() for g in expected.values())
    worst = max(
        (parity.error(parity.full(p.grad), expected[name], floor), name, str(p.grad.dtype))
        for name, p in model.named_parameters()
        if p.grad is not None
    )
    return loss.item(), reference.item(), worst[0], worst[2]


@pytest.mark.slow
@pytest.mark.parametrize("layered", [False, True])
def test_mixed_precision(ranks: RankPool, layered: bool) -> None:
    for loss, reference, worst, dtype in ranks.run(mixed, layered, timeout=300):
        assert abs(loss - reference) <= 2e-2 * abs(reference)
        assert worst <= 5e-2
        assert dtype == "torch.float32"


def saved(rank_info: RankInfo, folder: str, load: bool) -> list[float]:
    """Two steps of SGD with momentum; with `load`, the second after loading what was saved after the first."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    state = autosp.initialize(SP2)
    model = sharded("toy", toys.build(seed=int(load)), False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(2):
        weights, moments = get_state_dict(model, optimizer)
        if load and step == 0:
            dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
            continue
        if not load and step == 1:
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        # Both groups see one batch, so that runs with one group and with two agree.
        loss = model(**autosp.prepare_batch(engine_steps.batch_of(step, 0, 0))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert state.sizes["dp"] == rank_info.world_size // 2
    losses.append(model(**autosp.prepare_batch(engine_steps.batch_of(9, 0, 0))).loss.item())
    return losses


@pytest.mark.slow
def test_a_checkpoint_loads_on_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    first = ranks.run(saved, str(tmp_path / "checkpoint"), False, world_size=2)
    again = ranks.run(saved, str(tmp_path / "checkpoint"), True, world_size=4)
    for found in again:
        assert found == pytest.approx(first[0][1:], rel=1e-5)


def refusals(rank_info: RankInfo) -> dict[str, str]:
    found: dict[str, str] = {}
    record = engine_steps.recorder(found)
    record("no state", lambda: fsdp.fully_shard(toys.build()))
    state = autosp.initialize(SP2)
    record("mesh", lambda: fsdp.fully_shard(toys.build(), mesh=state.mesh))
    record("mode", lambda: fsdp.fully_shard(toys.build(), options={"gradient_reduction": "engine_sum"}))
    record("layer", lambda: fsdp.fully_shard(toys.build(), layers=[torch.nn.Linear(2, 2)]))
    toy = toys.build()
    record("nested", lambda: fsdp.fully_shard(toy, layers=[toy.mlp, toy.mlp[0]]))
    torch.distributed.fsdp.fully_shard(toy.mlp)
    record("sharded", lambda: fsdp.fully_shard(toy))
    # A toy adds positions to its embedding outside of every layer.
    toy = toys.build()
    fsdp.fully_shard(toy, layers=[toy.mlp])
    axis = Axis("sp", 2, rank_info.rank, state.sp_group)
    whole = LocalProgram(print, [], axis, state, [], "full", {})
    record("view", lambda: whole(shard(torch.ones(1, 4, 2), state.mesh["sp"], 1)))
    record("outside", lambda: toy(**autosp.prepare_batch(toys.batch(16))))
    return found


def test_what_does_not_fit_is_refused(ranks: RankPool) -> None:
    for found in ranks.run(refusals):
        assert "call autosp.initialize(config) first" in found["no state"]
        assert "a mesh is given" in found["mesh"]
        assert "gradient_reduction is 'engine_sum'" in found["mode"]
        assert "layers[0] is a Linear that is no module inside the model" in found["layer"]
        assert "inside another one of them" in found["nested"]
        assert "the module 'mlp' is sharded by FSDP2 already" in found["sharded"]
        assert (
            "(1, 4, 2) arrived sharded over the sequence where the compiled program expects it whole" in found["view"]
        )
        assert "outside the compiled model takes a value that is sharded over the sequence" in found["outside"]


def test_the_script_of_the_page_runs_as_it_stands(ranks: RankPool, tmp_path: Path) -> None:
    script = tmp_path / "train_fsdp.py"
    script.write_text(engine_steps.script_of("fsdp"))
    results = ranks.run(engine_steps.run_script, str(script), world_size=4, process_group=False, timeout=300)
    assert all(result["losses"] == pytest.approx(results[0]["losses"], rel=1e-6) for result in results)
    assert results[0]["losses"][-1] < results[0]["losses"][0]
    assert (tmp_path / "checkpoint" / ".metadata").exists()
