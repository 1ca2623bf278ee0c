"""A window of resident layers over a host copy: what is not in it is dropped, never copied out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from valve_tune.base.weights import BadBase, Tensors, digest_of, split
from valve_tune.tiles.grid import Phase
from valve_tune.train.report import Answer, Control

PIECE_BYTES = 16 << 20  # one copy: nothing stops it once it has begun


class Parked(Exception):
    """A layer was asked for while the window has no slot: the job had to be paused first."""


class HostWindow:
    """`window` slots, each as large as a layer. Going through the layers in order and back costs 2 (L - W) loads."""

    def __init__(
        self,
        tensors: Tensors,
        layers: int,
        window: int,
        device: torch.device | str = "cpu",
        before_copy: Callable[[], None] = lambda: None,
    ) -> None:
        self.digest, self.layers, self.loads = digest_of(tensors), layers, 0
        self._device, self._before_copy = torch.device(device), before_copy
        outer, self._host = split(tensors, layers)
        self._even()
        if self._device.type == "cuda":
            self._host = [{name: each.pin_memory() for name, each in layer.items()} for layer in self._host]
        self.outer: Tensors = {name: tensor.to(self._device) for name, tensor in outer.items()}
        self._free: list[dict[str, torch.Tensor]] = []
        self._slot_of: dict[int, dict[str, torch.Tensor]] = {}
        self._at, self._phase, self.window = 0, Phase.FORWARD, 0
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
        self._free = self._free[:spare]
        self._free += [self._slot() for _ in range(spare - len(self._free))]
        self.window = window
        for layer in dict.fromkeys(self._ahead()):
            if self._free and layer not in self._slot_of:
                self._load(layer)

    def _slot(self) -> dict[str, torch.Tensor]:
        return {name: torch.empty_like(each, device=self._device) for name, each in self._host[0].items()}

    def _load(self, layer: int) -> None:
        slot = self._free.pop()
        for name, source in self._host[layer].items():
            rows = max(1, PIECE_BYTES // max(1, source[:1].numel() * source.element_size()))
            for there, here in zip(slot[name].split(rows), source.split(rows), strict=True):
                self._before_copy()
                there.copy_(here, non_blocking=True)
        self._slot_of[layer] = slot
        self.loads += 1

    def enter(self, layer: int, phase: Phase) -> Tensors:
        if not self.window:
            raise Parked(f"layer {layer} is needed and the window is closed")
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

    def check(self) -> None:
        """The host copy is private, and slots are only ever written from it."""


class WindowControl:
    """Sets the window to what is granted, between any two tiles; a window of nothing pauses the job."""

    def __init__(self, inner: Control, window: HostWindow, granted: Callable[[], int]) -> None:
        self._inner, self._window, self._granted = inner, window, granted

    def answer(self) -> Answer:
        granted = self._granted()
        if granted != self._window.window:
            self._window.resize(granted)
        answer = self._inner.answer()
        return Answer.PAUSE if answer is Answer.GO and not self._window.window else answer

    def wait(self) -> None:
        self._inner.wait()
