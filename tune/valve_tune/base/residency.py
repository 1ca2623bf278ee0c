"""A window of resident layers over a host copy: what is not in it is dropped, never copied out.

Its slots may lie in the memory that the stash lies in, which valved lends and takes back: then the window is as large
as that allows, and what was taken from under it is read from the host again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from valve_tune.base.copies import Before, copy, moved, when_open
from valve_tune.base.memory import NoRoom, StashLost, StashMemory, TorchMemory, taken_bytes
from valve_tune.base.weights import BadBase, Tensors, digest_of, split
from valve_tune.tiles.grid import Phase


class Parked(Exception):
    """A layer was asked for while the window has no slot: the job had to be paused first."""


class HostWindow:
    """`window` slots, each as large as a layer. Going through the layers in order and back costs 2 (L - W) loads."""

    is_writable = False

    def __init__(
        self,
        tensors: Tensors,
        layers: int,
        window: int,
        device: torch.device | str = "cpu",
        before_copy: Before | None = None,
        *,
        memory: StashMemory | None = None,
    ) -> None:
        """With `memory` the slots are taken from there, `window` of them at most, when a micro-batch begins."""
        self.digest, self.layers, self.loads = digest_of(tensors), layers, 0
        self._device, self._before_copy = torch.device(device), before_copy or when_open(device)
        outer, self._host = split(tensors, layers)
        self._even()
        if self._device.type == "cuda":
            self._host = [{name: each.pin_memory() for name, each in layer.items()} for layer in self._host]
        self.outer: Tensors = {name: moved(tensor, self._device, self._before_copy) for name, tensor in outer.items()}
        self._free: list[dict[str, torch.Tensor]] = []
        self._slot_of: dict[int, dict[str, torch.Tensor]] = {}
        self._at, self._phase, self.window = 0, Phase.FORWARD, 0
        self.most = min(window, layers)
        self._is_lent, self._memory = memory is not None, memory or TorchMemory()
        self._generation = self._memory.generation()
        self.least_bytes = sum(map(taken_bytes, self._host[0].values())) if self._is_lent else 0
        if not self._is_lent:
            self.resize(window)

    def _even(self) -> None:
        """Slots are fixed: every layer must fit in every one."""
        plans = [{name: (each.shape, each.dtype) for name, each in layer.items()} for layer in self._host]
        if any(plan != plans[0] for plan in plans):
            raise BadBase("layers of different shapes cannot share slots: use an own copy")

    @property
    def resident(self) -> list[int]:
        return sorted(self._slot_of)

    def _ahead(self) -> Iterator[int]:
        """Layers in the order in which they are used from here on: to the turn, and back."""
        up, down = range(self._at, self.layers), range(self._at, -1, -1)
        if self._phase is Phase.FORWARD:
            yield from (*up, *reversed(range(self.layers)))
        else:
            yield from (*down, *range(self.layers))

    def _farthest(self) -> int:
        """The resident layer whose next use is last."""
        order = list(dict.fromkeys(self._ahead()))
        return max(self._slot_of, key=order.index)

    def resize(self, window: int) -> None:
        """At a tile border. Smaller: what is used last goes. Larger: what is used next comes."""
        window = max(0, min(window, self.layers))
        while len(self._slot_of) > window:
            self._free.append(self._slot_of.pop(self._farthest()))
        spare = window - len(self._slot_of)
        while len(self._free) > spare:
            self._give(self._free.pop())
        self._free += [self._slot() for _ in range(spare - len(self._free))]
        self.window = window
        for layer in dict.fromkeys(self._ahead()):
            if self._free and layer not in self._slot_of:
                self._load(layer)

    def _slot(self) -> dict[str, torch.Tensor]:
        """Raises NoRoom, with nothing taken."""
        slot: dict[str, torch.Tensor] = {}
        try:
            for name, each in self._host[0].items():
                slot[name] = self._memory.take(each.shape, each.dtype, self._device)
        except NoRoom:
            self._give(slot)
            raise
        return slot

    def _give(self, slot: dict[str, torch.Tensor]) -> None:
        for each in slot.values():
            self._memory.give(each)

    @property
    def lent_bytes(self) -> int:
        return self.least_bytes * self.window

    def fit(self, spare: int) -> bool:
        """After a reclaim it is not known which slots were spared: all are given back."""
        if not self._is_lent:
            return self.window > 0
        self._at, self._phase = 0, Phase.FORWARD
        if self._memory.generation() != self._generation:
            self.resize(0)
            self._generation = self._memory.generation()
        while self.window and self._memory.room() < spare:
            self.resize(self.window - 1)
        with contextlib.suppress(NoRoom):
            while self.window < self.most and self._memory.room() >= spare + self.least_bytes:
                self.resize(self.window + 1)
        self._memory.settle()
        return self.window > 0

    def _load(self, layer: int) -> None:
        slot = self._free.pop()
        for name, source in self._host[layer].items():
            copy(slot[name], source, self._before_copy)
        self._slot_of[layer] = slot
        self.loads += 1

    def enter(self, layer: int, phase: Phase) -> Tensors:
        if not self.window:
            raise Parked(f"layer {layer} is needed and the window is closed")
        if self._is_lent and self._memory.generation() != self._generation:
            raise StashLost("memory of resident layers was reclaimed")
        self._at, self._phase = layer, phase
        if layer not in self._slot_of:
            if not self._free:
                self._free.append(self._slot_of.pop(self._farthest()))
            self._load(layer)
        return self._slot_of[layer]

    def leave(self, layer: int, phase: Phase) -> None:
        """The slot goes to the next layer of this direction that is not there. At the turn there is none, so the last
        layers stay for the way back.
        """
        rest = range(layer + 1, self.layers) if phase is Phase.FORWARD else range(layer - 1, -1, -1)
        missing = next((each for each in rest if each not in self._slot_of), None)
        if missing is not None and layer in self._slot_of:
            self._free.append(self._slot_of.pop(layer))
            self._load(missing)

    def permitted(self) -> None:
        """They are the job's own."""

    def check(self) -> None:
        """The host copy is private, and slots are only ever written from it."""
