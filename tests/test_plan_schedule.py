"""What a plan takes to be in memory together: kernels that Inductor joins, and the order of work around collectives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product as product_of
from random import Random
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from autosp.config import AutoSPConfig
from autosp.plan import schedule
from autosp.plan.program import Buffer, Program, Work
from autosp.plan.schedule import scheduled_program
from autosp.plan.trace import Trace
from autosp.plan.walk import profile

ROWS, WIDE, NARROW = 32, 16, 4
c10d = torch.ops._c10d_functional


def summed(x: Any) -> Any:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", torch.distributed.group.WORLD.group_name))


def exchanged(x: Any) -> Any:
    halves = [x.shape[0] // 2] * 2
    return c10d.wait_tensor(c10d.all_to_all_single(x, halves, halves, torch.distributed.group.WORLD.group_name))


def program_of(function: Callable[..., Any], *inputs: torch.Tensor, raised: bool = False) -> tuple[Program, str]:
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    text = str(gm.graph)
    program = scheduled_program(gm, AutoSPConfig(overlap_communication=raised))
    assert str(gm.graph) == text, "the graph itself stays"
    return program, text


def mlp_backward(x: Any, gate: Any, up: Any, down: Any, grad: Any) -> tuple[Any, ...]:
    """Of ``down(silu(gate(x)) * up(x))``, everything computed again."""
    g, u = x @ gate, x @ up
    wide = F.silu(g) * u
    grad_wide = grad @ down.t()
    grad_u = grad_wide * F.silu(g)
    grad_g = grad_wide * u * torch.sigmoid(g) * (1 + g * (1 - torch.sigmoid(g)))
    return wide.t() @ grad, x.t() @ grad_u, x.t() @ grad_g, grad_u @ up.t() + grad_g @ gate.t()


def weights() -> list[torch.Tensor]:
    return [torch.ones(NARROW, WIDE), torch.ones(NARROW, WIDE), torch.ones(WIDE, NARROW)]


def most_alive(program: Program, large: int) -> int:
    """Buffers of at least ``large`` bytes that are made and not yet read for the last time, at most."""
    last = {number: place for place, work in enumerate(program.work) for number in [*work.made, *work.read]}
    alive: set[int] = set()
    most = 0
    for place, work in enumerate(program.work):
        alive |= {number for number in work.made if program.buffers[number].size >= large}
        most = max(most, len(alive))
        alive = {number for number in alive if last[number] > place}
    return most


def test_the_backward_of_a_gated_mlp_is_one_kernel_with_six_wide_values():
    inputs = [torch.ones(ROWS, NARROW), *weights(), torch.ones(ROWS, NARROW)]
    program, _ = program_of(mlp_backward, *inputs)
    (kernel,) = (work for work in program.work if work.elements == ROWS * WIDE)
    assert len(kernel.made) == 3 and len(kernel.read) == 3
    assert kernel.moved == 6 * ROWS * WIDE * 4
    assert most_alive(program, ROWS * WIDE * 4) == 6


def test_kernels_with_a_product_between_them_stay_apart():
    def function(x: Any, weight: Any) -> Any:
        y = x.exp()
        z = y @ weight
        return y @ weight.t(), (z * x).cos() @ weight

    program, _ = program_of(function, torch.ones(8, 8), torch.ones(8, 8))
    assert sum(work.elements is not None for work in program.work) == 2


def test_work_follows_what_it_needs():
    inputs = [torch.ones(ROWS, NARROW), *weights(), torch.ones(ROWS, NARROW)]
    for raised in (False, True):
        program, _ = program_of(mlp_backward, *inputs, raised=raised)
        there = set(program.given.values())
        for work in program.work:
            assert set(work.read) <= there
            there |= set(work.made)


def test_what_the_next_collective_does_not_need_comes_after_it(fake_ranks: Callable[..., None]):
    """The gradient of a weight waits, and so does what it is made of; its sum is written over it."""
    fake_ranks(2)

    def function(x: Any, weight: Any, grad: Any) -> Any:
        wide = torch.exp(x @ weight)
        grad_weight = summed(x.t() @ (wide * grad))
        arrived = exchanged((wide * grad) @ weight.t())
        return grad_weight, arrived @ weight

    inputs = torch.ones(ROWS, NARROW), torch.ones(NARROW, WIDE), torch.ones(ROWS, WIDE)
    found = {}
    for raised in (False, True):
        program, _ = program_of(function, *inputs, raised=raised)
        sizes = [sum(program.buffers[n].size for n in work.made) for work in program.work]
        exchange = next(i for i, work in enumerate(program.work) if work.sent and work.made)
        found[raised] = sizes.index(NARROW * WIDE * 4) < exchange
        sums = [work for work in program.work if work.sent and not work.made]
        assert len(sums) == 1 and sums[0].sent == 2 * NARROW * WIDE * 4 / 2
    assert found == {False: True, True: False}


def test_a_sum_of_what_others_read_too_is_a_buffer_of_its_own(fake_ranks: Callable[..., None]):
    fake_ranks(2)

    def function(x: Any) -> Any:
        y = x @ x
        return summed(y), y @ x

    program, _ = program_of(function, torch.ones(8, 8))
    assert [len(work.made) for work in program.work if work.sent] == [1]


def test_a_sum_of_what_a_view_shows_to_others_is_a_buffer_of_its_own(fake_ranks: Callable[..., None]):
    fake_ranks(2)

    def product(x: Any) -> Any:
        y = x @ x
        return summed(y.view(64)), y.t() @ x

    def given(x: Any) -> Any:
        return summed(x.view(64)), x @ x

    for function in (product, given):
        program, _ = program_of(function, torch.ones(8, 8))
        assert [len(work.made) for work in program.work if work.sent] == [1]


def test_gradients_that_are_summed_together_are_kept(fake_ranks: Callable[..., None]):
    """Each is returned in the buffer that was made for it, and is a gradient until the end of the backward."""
    fake_ranks(2)

    def function(x: Any, weight: Any) -> Any:
        first, second = x @ weight, weight.t() @ weight.t()
        return summed(first), summed(second), exchanged(x)

    for raised in (False, True):
        program, _ = program_of(function, torch.ones(8, 8), torch.ones(8, 8), raised=raised)
        made = {number for work in program.work for number in work.made}
        assert len(made) == 3 and set(program.returned.values()) == made
        found = profile(Trace([], [program]), 1)
        assert max(moment.parts["gradients"] for moment in found.moments.values()) == 3 * 8 * 8 * 4


def test_a_gradient_of_two_parameters_is_summed_twice(fake_ranks: Callable[..., None]):
    """``x + a + b``: both get the same gradient, which one sum of two operands is given twice."""
    fake_ranks(2)

    def function(x: Any) -> Any:
        y = x @ x
        return summed(y), summed(y)

    for raised in (False, True):
        program, _ = program_of(function, torch.ones(8, 8), raised=raised)
        assert len({number for work in program.work for number in work.made}) == 3
        assert sum(work.sent for work in program.work) == 2 * 8 * 8 * 4
        assert len(set(program.returned.values())) == 2


def test_no_work_is_lost_or_put_before_what_it_needs():
    """Random programs: each work is there once, whatever is joined and moved."""
    for seed in range(300):
        random, program = Random(seed), Program()
        program.buffers[0] = Buffer(64, "activations")
        for place in range(random.randint(4, 40)):
            wide = random.choice([8, 64])
            program.buffers[place + 1] = Buffer(wide, "activations")
            read = {random.randrange(place + 1) for _ in range(random.randint(1, 3))}
            fused, sent = random.random() < 0.6, random.choice([0, 0, 5])
            elements, sent = (wide, 0) if fused else (None, sent)
            product = not fused and not sent and random.random() < 0.5
            program.work.append(Work(0, [place + 1], read, sent=sent, elements=elements, product=product))
        for raised, in_order in product_of((False, True), repeat=2):
            groups = schedule._fused(program, in_order)
            order = schedule._ordered(program, groups, raised, in_order)
            products = [work.made for work in order if work.product]
            assert not in_order or products == sorted(products)
            assert sorted(n for work in order for n in work.made) == list(range(1, len(program.buffers)))
            there = {0}
            for work in order:
                assert work.read <= there
                there |= set(work.made)


def test_products_in_their_order_keep_kernels_apart_that_would_join():
    """The gradient of one weight stands before the product that the other outputs need: they cannot be one kernel."""
    inputs = [torch.ones(ROWS, NARROW), *weights(), torch.ones(ROWS, NARROW)]

    def function(x: Any, gate: Any, up: Any, down: Any, grad: Any) -> tuple[Any, ...]:
        g, u = x @ gate, x @ up
        grad_down = (F.silu(g) * u).t() @ grad
        grad_wide = grad @ down.t()
        return grad_down, x.t() @ (grad_wide * F.silu(g)), x.t() @ (grad_wide * u * torch.sigmoid(g))

    kernels = {}
    for tiles in (1, 2):
        config = AutoSPConfig(token_tiles=tiles, overlap_communication=False)
        program = scheduled_program(make_fx(function, tracing_mode="fake")(*inputs), config)
        kernels[tiles] = [len(work.made) for work in program.work if work.elements == ROWS * WIDE]
    assert kernels == {1: [3], 2: [1, 2]}
