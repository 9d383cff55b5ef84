"""Copies between a GPU and the host on a stream of their own: each has an operator that starts it and one that waits.

``autosp::to_host(x) -> host`` and ``autosp::to_host_done(host, x) -> host``, ``autosp::from_host(host, device) -> x``
and ``autosp::from_host_done(x) -> x``. What computes does not stop for a copy before its second operator, and then on
the device alone: the host waits for none. The second operator is also what keeps the memory that is read: it takes the
tensor that the copy reads or writes, which a program frees after it. (``Tensor.record_stream`` would need no second
operator. But it gives memory back when the *host* sees that a copy is done, and the host issues a whole forward
before the device has run a layer of it: nothing would be used again.)

On a CPU all of them are plain copies. torch 2.13 has such a pair (``torch.ops.ao``), torch 2.11 has not.
"""

from __future__ import annotations

import torch

from ..errors import InternalError

_LIBRARY = torch.library.Library("autosp", "FRAGMENT")

_streams: dict[torch.device, torch.cuda.Stream] = {}
_running: dict[int, tuple[int, torch.cuda.Event | None]] = {}
"""Copies that nobody waited for yet, by the address of what they write: the address of what they read, their end."""
_written: dict[int, torch.Tensor] = {}
"""What those copies write, by its address: a step that ends with an error in between must not give it back before."""


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first element to its last as one vector, so that a copy is one transfer."""
    if x.numel() == 0:
        return x.as_strided((0,), (1,))
    return x.as_strided((1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)),), (1,))


def _copy(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
    if not target.numel():
        return
    _give_up()
    event = None
    if device.type != "cuda":
        _flat(target).copy_(_flat(source))
    else:
        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            _flat(target).copy_(_flat(source), non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
    _running[target.data_ptr()] = source.data_ptr(), event
    _written[target.data_ptr()] = target


def _give_up() -> None:
    """Let go of what copies wrote that are done, awaited or not."""
    for address, (_, event) in list(_running.items()):  # a backward of another device may add its own
        if event is None or event.query():
            _written.pop(address, None)


def _wait(target: torch.Tensor, source: torch.Tensor | None, device: torch.device) -> None:
    """Have the device wait for the copy that writes ``target``.

    Raises:
        InternalError: there is none, or it reads something else than ``source``. A compiler that hands an operator a
            copy of its input made the two operators of a pair unlike; what the first one read would not be kept.
    """
    if not target.numel():
        return
    _written.pop(target.data_ptr(), None)
    read, event = _running.pop(target.data_ptr(), (None, None))
    if read is None or source is not None and read != source.data_ptr():
        raise InternalError(
            f"the copy of a value of shape {tuple(target.shape)} is awaited with other memory than it began with: "
            'set activation_offloading to false, or inner_backend to "aot_eager"'
        )
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def _to_host(x: torch.Tensor) -> torch.Tensor:
    on_gpu = x.device.type == "cuda"
    host = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu", pin_memory=on_gpu)
    _copy(host, x.detach(), x.device)
    return host


def _to_host_done(host: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    _wait(host, x, x.device)
    return host


def _from_host(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Made where the program computes, so that its memory is given back there.
    x = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    _copy(x, host.detach(), x.device)
    return x


def _from_host_done(x: torch.Tensor) -> torch.Tensor:
    _wait(x, None, x.device)
    return x


def _define(schema: str, function: object, fake: object) -> None:
    """The results have the strides of what they are made of, whatever these are: the compiler need not change them."""
    _LIBRARY.define(schema, tags=(torch.Tag.flexible_layout,))
    name = schema.split("(")[0]
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autosp::{name}", fake, lib=_LIBRARY)


def _like(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


_define("to_host(Tensor x) -> Tensor", _to_host, lambda x: _like(x, "cpu"))
_define("to_host_done(Tensor(a) host, Tensor x) -> Tensor(a)", _to_host_done, lambda host, x: host)
_define("from_host(Tensor host, Device device) -> Tensor", _from_host, _like)
_define("from_host_done(Tensor(a) x) -> Tensor(a)", _from_host_done, lambda x: x)

TO_HOST = torch.ops.autosp.to_host.default
TO_HOST_DONE = torch.ops.autosp.to_host_done.default
FROM_HOST = torch.ops.autosp.from_host.default
FROM_HOST_DONE = torch.ops.autosp.from_host_done.default
COPIES = (TO_HOST, TO_HOST_DONE, FROM_HOST, FROM_HOST_DONE)
