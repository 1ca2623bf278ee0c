"""What missed targets teach: how much time to keep in reserve, and when to grant nothing at all."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from .recent import Recent


@dataclass(frozen=True, slots=True, kw_only=True)
class MissSettings:
    share: float = 0.005
    """The share of requests that may miss."""
    up_ms: float = 10.0
    """What the reserve grows by at a miss."""
    factor: float = 1.25
    """And by which factor on top."""
    floor: float = 0.25
    """The least reserve, in prefill bursts (p95)."""
    ceiling: float = 4.0
    """The largest, in prefill bursts (p95), unless requests needed more."""
    window: int = 400
    """Finished requests over which misses are counted, and over which needs are kept."""
    trial: int = 48
    """Requests in a row that must keep the target, served without a grant, before the first grant."""
    again: int = 200
    """The same after too many misses, and before the first grant where needs are heavy: 1 / share."""
    heavy: float = 0.1
    """A need is heavy above this part of what a request can earn by being faster than its target."""
    spared: float = 1.0
    """Misses by grants that are borne before any request has paid for one."""
    spared_most: float = 2.0
    """So many are saved up at most."""


class Needs:
    """How far the steps of each request fell behind its pace, pauses left out, from the worst moment to its last
    token: the reserve that would have kept its target, had pauses spent all else until that moment."""

    KEPT = 1024

    def __init__(self, pace_ms: float) -> None:
        self._pace_ms = pace_ms
        self._steps = 0
        self._behind_ms = 0.0
        self._since: dict[int, tuple[int, float]] = {}
        # Moments that none after them lies below: the least from any step on is the first of these from there on.
        self._at: list[int] = []
        self._least_ms: list[float] = []
        self._most = self.KEPT

    def stepped(self, ms: float) -> None:
        """A step and the host gap before it took `ms`."""
        self._steps += 1
        if not self._since:
            return
        self._behind_ms += ms - self._pace_ms
        at, least = self._at, self._least_ms
        while least and least[-1] >= self._behind_ms:
            least.pop()
            at.pop()
        at.append(self._steps)
        least.append(self._behind_ms)
        if len(at) > self._most:
            oldest = bisect_left(at, min(since for since, _ in self._since.values()))
            del at[:oldest], least[:oldest]
            self._most = max(self.KEPT, 2 * len(at))

    def begin(self, request: int) -> None:
        """It got its first token in the step told last."""
        if not self._since:
            self._at, self._least_ms = [self._steps], [self._behind_ms]
        self._since[request] = self._steps, self._behind_ms

    def end(self, request: int) -> float | None:
        """It got its last token; None where no reserve could have helped: without any pause it is late, too."""
        begun = self._since.pop(request, None)
        if begun is None or self._behind_ms > begun[1]:
            return None
        return self._behind_ms - self._least_ms[bisect_left(self._at, begun[0])]

    def drop(self, request: int) -> None:
        self._since.pop(request, None)


class TimeReserve:
    """Time kept back for prompts that come while others are served. It begins with the (1 - share) quantile of what
    requests needed. From then on misses tell: of several who read, one alone rides at the reserve."""

    def __init__(self, settings: MissSettings) -> None:
        self._settings = settings
        self._bursts = Recent(0.95, size=256, every=16)
        self._needs = Recent(1.0 - settings.share, size=settings.window, every=8)
        self._ms = 0.0

    @property
    def ms(self) -> float:
        burst, rules = self._bursts.value, self._settings
        most = max(rules.ceiling * burst, self._needs.value)
        return max(min(self._ms, most), rules.floor * burst)

    @property
    def needed_ms(self) -> float:
        return self._needs.value

    def burst(self, ms: float) -> None:
        """A prefill burst held up decoding requests by `ms`."""
        self._bursts.add(ms)

    def needed(self, ms: float, *, is_open: bool) -> None:
        """A request needed `ms`. While nothing is granted, the reserve is what was needed."""
        self._needs.add(ms)
        if not is_open:
            self._ms = self._needs.value

    def finished(self, missed: bool) -> None:
        """`missed`: and would have kept its target without pauses. The steps up and down balance at the share."""
        rules = self._settings
        # From where it stands: a value far outside the bounds would need hundreds of requests to come back.
        held = self.ms
        if missed:
            self._ms = (held + rules.up_ms) * rules.factor
        else:
            part = rules.share / (1.0 - rules.share)
            self._ms = max(0.0, held * rules.factor**-part - rules.up_ms * part)


class MissStop:
    """Stops granting while more than the allowed share misses; begins stopped, until the service alone has shown that
    it keeps its target. A burst of prompts makes all miss who read: each miss by a grant is paid for by 1 / share
    requests, and until it is, granting stays stopped."""

    def __init__(self, settings: MissSettings) -> None:
        self._settings = settings
        self._window: deque[bool] = deque(maxlen=settings.window)
        self._misses = 0
        self._clean = 0
        self._needed = settings.trial
        self._spared = settings.spared
        self.is_open = settings.trial == 0
        self.stops = 0

    def finished(self, missed: bool, *, by_grant: bool = False, is_heavy: bool = False) -> None:
        """`by_grant`: without pauses it would have kept its target. `is_heavy`: needs are, by `MissSettings.heavy`."""
        rules = self._settings
        self._spared = min(rules.spared_most, self._spared + rules.share) - by_grant
        if not self.is_open:
            self._clean = 0 if missed else self._clean + 1
            if self._clean >= (rules.again if is_heavy else self._needed) and self._spared >= 0:
                self._restart(is_open=True)
            return
        if len(self._window) == self._window.maxlen:
            self._misses -= self._window[0]
        self._window.append(missed)
        self._misses += missed
        if self._misses > rules.share * rules.window or self._spared < 0:
            self.stops += 1
            self._needed = rules.again
            self._restart(is_open=False)

    def _restart(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self._window.clear()
        self._misses = self._clean = 0
