"""Copies between the host and a card, in pieces; before each a kernel of this process has run, so the gate was open.

The gate stops kernels and not copies, which run on channels of their own. A piece that has begun ends in about a
millisecond, whatever the gate does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

PIECE_BYTES = 16 << 20  # nothing stops a copy once it has begun
Before = Callable[[], None]


def when_open(device: torch.device | str) -> Before:
    """Returns while the gate is open. On a CPU nothing has to be waited for."""
    if torch.device(device).type != "cuda":
        return lambda: None
    probe = torch.zeros(1, device=device)

    def wait() -> None:
        probe.add_(1)
        torch.cuda.current_stream(probe.device).synchronize()

    return wait


def copy(there: torch.Tensor, here: torch.Tensor, before: Before) -> None:
    if not here.dim():
        there, here = there.view(1), here.view(1)
    rows = max(1, PIECE_BYTES // max(1, here[:1].numel() * here.element_size()))
    for to, source in zip(there.split(rows), here.split(rows), strict=True):
        before()
        to.copy_(source, non_blocking=True)


def on_host(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its elements in order, in pieces on the CPU."""
    flat = tensor.detach().reshape(-1)
    if tensor.device.type == "cpu":
        yield flat
        return
    before = when_open(tensor.device)
    for piece in flat.split(max(1, PIECE_BYTES // tensor.element_size())):
        before()
        yield piece.cpu()


def moved(tensor: torch.Tensor, device: torch.device | str, before: Before) -> torch.Tensor:
    """The tensor on that device; itself if it is there."""
    if tensor.device.type == torch.device(device).type:
        return tensor.detach()
    there = torch.empty_like(tensor, device=device)
    copy(there, tensor.detach(), before)
    return there


def move_module(module: torch.nn.Module, device: torch.device | str) -> None:
    """As `module.to` does, in pieces."""
    before = when_open(device)
    module._apply(lambda tensor: moved(tensor, device, before))
