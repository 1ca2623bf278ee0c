"""A CUDA driver of our own for the card lane: what is called, what is alive, and a call that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from valve_hook.cotrain.card.driver import CALLS, NOT_READY

MAKES = {
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease_v2",
    "cuGreenCtxCreate": "cuGreenCtxDestroy",
    "cuGreenCtxStreamCreate": "cuStreamDestroy_v2",
    "cuEventCreate": "cuEventDestroy_v2",
    "cuCtxPushCurrent_v2": "cuCtxPopCurrent_v2",
}
GIVES = {*MAKES, "cuDevResourceGenerateDesc", "cuCtxFromGreenCtx"} - {"cuCtxPushCurrent_v2"}
OUT_OF_MEMORY, BAD = 2, 1


class FakeDriver:
    """130 processors in granules of 8. `alive`: made and not undone. The card has come past `done` events."""

    def __init__(self, *, absent: str = "", fails: str = "", at: int = 1) -> None:
        self.said: list[str] = []
        self.alive: dict[str, int] = dict.fromkeys(MAKES, 0)
        self.at, self.fails, self.code = at, fails, BAD
        self.recorded: dict[int, int] = {}
        self.done, self.free = 1 << 30, 1 << 40
        self._next = 100
        for name in (*CALLS, "cuGetErrorName"):
            if name != absent:
                setattr(self, name, self._entry(name))

    def _entry(self, name: str) -> Callable[..., int]:
        def entry(*arguments: Any) -> int:
            if name == "cuGetErrorName":
                arguments[1]._obj.value = {2: b"CUDA_ERROR_OUT_OF_MEMORY"}.get(arguments[0], b"CUDA_ERROR_UNKNOWN")
                return 0
            self.said.append(name)
            if name == self.fails and self.said.count(name) == self.at:
                return self.code
            return self._does(name, [getattr(each, "_obj", each) for each in arguments])

        return entry

    def _does(self, name: str, of: list[Any]) -> int:
        for makes, ends in MAKES.items():
            self.alive[makes] += (name == makes) - (name == ends)
        self._next += 1
        if name in GIVES:
            of[0].value = self._next
        elif name == "cuDeviceGetDevResource":
            of[1].type, of[1].sms = 1, 130
        elif name == "cuDevSmResourceSplitByCount":
            of[0].type, of[0].sms = 1, (of[5] + 7) // 8 * 8
        elif name == "cuEventRecord":
            self.recorded[of[0]] = len(self.recorded_so_far())
        elif name == "cuEventQuery":
            return 0 if self.recorded[of[0]] < self.done else NOT_READY
        elif name == "cuEventElapsedTime":
            of[0].value = 3.0
        elif name == "cuMemGetInfo_v2":
            of[0].value = self.free
        return 0

    def recorded_so_far(self) -> list[str]:
        return [name for name in self.said[:-1] if name == "cuEventRecord"]
