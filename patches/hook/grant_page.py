"""The words of granted time between an engine's hook and valved: consent and answers are read, wishes written and rung.

One object for each connection: the pages of a valved that is gone stay readable, and nobody answers there.
"""

from __future__ import annotations

import mmap

from valve_hook import wire
from valve_hook.shared import Bell, fence
from valve_hook.wire import GrantAnswer

KNOWN = {answer.value: answer for answer in GrantAnswer}


class GrantPage:
    """In the pages of a valved that knows of no granted time the words are 0: there is no consent. `clock_ns`: what our
    clock lacks to valved's. Times in the pages are by valved's, and those that are passed here by ours."""

    def __init__(self, control_fd: int, region: mmap.mmap, bell: Bell, clock_ns: int = 0) -> None:
        self._clock_ns = clock_ns
        self._control = mmap.mmap(control_fd, wire.CONTROL_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        told, asked = memoryview(self._control), memoryview(region)
        at, size = wire.GRANT_AT, 4
        self._consented = told[at + wire.GRANT_CONSENTED :][:size].cast("I")
        self._answer = told[at + wire.GRANT_ANSWER :][: 2 * size].cast("I")  # and the number it is to
        self._by_slices = told[at + wire.GRANT_BY_SLICES :][:size].cast("I")
        self._target = told[at + wire.GRANT_TPOT_NS :][:24].cast("Q")  # tpot, gap, and until when it is shared
        self._words = asked[wire.REGION_GRANT_UNTIL_NS :][:24].cast("Q")  # until, and begin and end of the last step
        self._seq = asked[wire.REGION_GRANT_SEQ :][:size].cast("I")
        self._bell = bell

    @property
    def consented(self) -> bool:
        return self._consented[0] != 0

    @property
    def target_ms(self) -> tuple[float, float]:
        """What the owner stated: tpot and gap."""
        return self._target[0] / 1e6, self._target[1] / 1e6

    @property
    def by_slices(self) -> bool:
        """Whether pauses need no call of their own once valved has opened: hook/sharing.py."""
        return self._by_slices[0] != 0

    @property
    def shared_until_ns(self) -> int:
        """Until when offline work may run beside the steps; 0: it may not, or valved knows of no such word."""
        until_ns = int(self._target[2])
        return until_ns and until_ns - self._clock_ns

    def move_on(self, until_ns: int) -> None:
        """The end of what is shared, without a ring."""
        self._words[0] = until_ns and until_ns + self._clock_ns

    def ask(self, until_ns: int) -> int:
        """Offline work may run until then; 0: no longer. The number of the request. Never waits."""
        seq = (self._seq[0] + 1) & 0xFFFFFFFF
        self._words[0] = until_ns and until_ns + self._clock_ns
        fence()
        self._seq[0] = seq
        fence()
        self._bell.ring()
        return seq

    def answer(self, seq: int) -> GrantAnswer | None:
        """None: none to this request yet. One that this hook does not know is a refusal, too."""
        if self._answer[1] != seq:
            return None
        fence()
        return KNOWN.get(self._answer[0], GrantAnswer.NONE)

    def stepped(self, begin_ns: int, end_ns: int) -> None:
        """The end is written last."""
        self._words[1], self._words[2] = begin_ns + self._clock_ns, end_ns + self._clock_ns
