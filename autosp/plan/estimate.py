"""Memory and time of a step of the whole model on one rank: weights, gradients, optimizer and what the walk found.

Few layers tell about many: a trace of ``a`` and one of ``b`` layers give each figure as a line in the number of
layers, since numbered layers are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import InputError
from .program import PARTS
from .trace import Trace
from .walk import Moment, Profile, profile

# Bytes of optimizer state for each number of a parameter, given the bytes of the parameter itself.
OPTIMIZERS = {
    "adamw": lambda size: 2 * size,
    "adamw-fp32": lambda size: 8 if size == 4 else 12,  # two states, and master weights where those are not fp32
    "sgd": lambda size: 0,
    "none": lambda size: 0,
}
# What ranks of a replica share instead of each holding it (ZeRO 1 to 3).
SHARDINGS = ("none", "optimizer", "gradients", "parameters")


@dataclass(frozen=True)
class Hardware:
    """What a device and its links do at best; defaults are those measured on an H200 (PEERS: bf16 GEMM, copy, NVLink).

    Args:
        memory: bytes a device.
        flops: floating-point operations a second.
        bandwidth: bytes a second of the device's memory.
        link: bytes a second that a rank sends to its peers.
        headroom: share of the memory left to the context, the allocator's gaps and libraries.
    """

    memory: float = 141e9
    flops: float = 771e12
    bandwidth: float = 4.15e12
    link: float = 350e9
    headroom: float = 0.05


@dataclass
class Layered:
    """Traces of few layers, and how many the model has."""

    traces: dict[int, Trace]
    """By number of layers: one, or two to extend from."""
    layers: int

    def at(self, length: int) -> tuple[Profile, int, int, int]:
        """The step at ``length`` with all layers; bytes of weights, bytes and numbers of trained parameters."""
        profiles = {count: profile(trace, length) for count, trace in self.traces.items()}
        counts = sorted(profiles)
        if counts == [self.layers]:
            trace = self.traces[self.layers]
            return profiles[self.layers], trace.weights, trace.parameters, trace.elements
        a, b = counts
        extend = _line(a, b, self.layers)
        one, two = profiles[a], profiles[b]
        result = Profile(
            flops=extend(one.flops, two.flops),
            moved=extend(one.moved, two.moved),
            sent=extend(one.sent, two.sent),
        )
        for name in one.moments:
            if name in two.moments:
                # two traces may have their highest moments at different places of a stretch
                parts = {p: max(0.0, extend(one.moments[name].parts[p], two.moments[name].parts[p])) for p in PARTS}
                result.moments[name] = Moment(parts)
        # kernels are matched as totals: the time of the layers is the difference of the two traces
        result.kernels = [*two.kernels]
        result.repeat = (one.kernels, self.layers - b, b - a)
        sizes = [
            round(extend(getattr(self.traces[a], key), getattr(self.traces[b], key)))
            for key in ("weights", "parameters", "elements")
        ]
        return result, sizes[0], sizes[1], sizes[2]


def _line(a: int, b: int, at: int) -> Callable[[float, float], float]:
    return lambda x, y: x + (at - a) * (y - x) / (b - a)


@dataclass
class Estimate:
    """One step on one rank."""

    length: int
    parts: dict[str, float] = field(default_factory=dict)
    """Bytes by part at the moment of most memory: weights, optimizer, and those of `autosp.plan.program.PARTS`."""
    moment: str = ""
    """Where that moment is: "forward", "head", "last", "first", "middle" or "optimizer"."""
    seconds: float = 0.0
    """Roofline of the step: each kernel at the device's peak, then its communication, nothing overlapped."""
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    flops: float = 0.0
    sent: float = 0.0

    @property
    def total(self) -> float:
        """Bytes at the moment of most memory."""
        return sum(self.parts.values())


def estimate(
    layered: Layered,
    length: int,
    *,
    hardware: Hardware,
    optimizer: str = "adamw",
    sharding: str = "none",
    replicas: int = 1,
) -> Estimate:
    """Memory and time of a step at ``length`` tokens.

    Args:
        layered: traces of the step.
        length: tokens of the whole sequence.
        hardware: peaks, for the time.
        optimizer: a name of `OPTIMIZERS`.
        sharding: a name of `SHARDINGS`: what the ranks share.
        replicas: ranks that share it (all of the world).

    Raises:
        InputError: an unknown name, or a length other than the traced one of a model that fixes its length.
    """
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer {optimizer!r}; allowed: {', '.join(OPTIMIZERS)}")
    if sharding not in SHARDINGS:
        raise InputError(f"sharding {sharding!r}; allowed: {', '.join(SHARDINGS)}")
    for trace in layered.traces.values():
        if trace.symbol is None and trace.length != length:
            raise InputError(
                f"this model fixes its length when it is compiled ({trace.length} tokens were traced, {length} asked): "
                "only the length that is given can be estimated"
            )
    step, weights, parameters, elements = layered.at(length)
    level = SHARDINGS.index(sharding)
    state = elements * OPTIMIZERS[optimizer](parameters // elements if elements else 4)
    share = [1 / replicas if level >= needed else 1.0 for needed in (3, 2, 1)]
    fixed = {"weights": weights * share[0], "optimizer": state * share[2]}
    best: dict[str, float] = {**fixed, **dict.fromkeys(PARTS, 0.0), "gradients": parameters * share[1]}
    moment = "optimizer"
    for name, found in step.moments.items():
        parts = {**fixed, **found.parts, "gradients": found.parts["gradients"] * share[1]}
        if sum(parts.values()) > sum(best.values()):
            best, moment = parts, name
    compute = _kernel_seconds(step, hardware)
    communication = step.sent / hardware.link
    return Estimate(length, best, moment, compute + communication, compute, communication, step.flops, step.sent)


def _kernel_seconds(step: Profile, hardware: Hardware) -> float:
    """Each kernel takes the longer of its arithmetic and its traffic (Williams et al., Roofline, CACM 2009)."""

    def seconds(kernels: list[tuple[float, float]]) -> float:
        return sum(max(flops / hardware.flops, moved / hardware.bandwidth) for flops, moved in kernels)

    total = seconds(step.kernels)
    if step.repeat is not None:
        fewer, times, every = step.repeat
        total += (total - seconds(fewer)) * times / every
    return total


def longest(layered: Layered, *, hardware: Hardware, step: int, limit: int = 1 << 28, **how: object) -> Estimate | None:
    """The longest sequence that fits the device's memory, a multiple of ``step``; None where not even that does."""
    room = hardware.memory * (1 - hardware.headroom)

    def fits(count: int) -> Estimate | None:
        found = estimate(layered, count * step, hardware=hardware, **how)  # type: ignore[arg-type]
        return found if found.total <= room else None

    low, high = 0, 1
    best = None
    while high * step <= limit and (found := fits(high)) is not None:
        best, low, high = found, high, high * 2
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        if (found := fits(middle)) is not None:
            best, low = found, middle
        else:
            high = middle
    return best
