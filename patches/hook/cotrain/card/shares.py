"""Shares of a card's processors, made once when the engine starts: a green context for each, with one stream of the
lowest priority. What was made is undone where a later call fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from .driver import NON_BLOCKING, OWN_STREAM, CardDriver, CardRefused

SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardShare:
    """`context` is the green one in the form that can be made current."""

    share: float
    sms: int
    context: int
    stream: int


class CardShares:
    def __init__(self, driver: CardDriver, made: Sequence[CardShare], undo: Callable[[], None]) -> None:
        self.driver, self.all, self._undo = driver, tuple(made), undo
        self._is_closed = False

    def of(self, wanted: float) -> CardShare:
        """The largest that is not above what was wanted; the smallest where none is."""
        fitting = [each for each in self.all if each.share <= wanted + 1e-9]
        return fitting[-1] if fitting else self.all[0]

    def close(self) -> None:
        """Once; nothing of a tile may run any more."""
        if not self._is_closed:
            self._is_closed = True
            self._undo()


def open_shares(driver: CardDriver, device: int = 0, wanted: Sequence[float] = SHARES) -> CardShares:
    """Shares that the card rounds to the same processors are one. None has more processors than it says."""
    made: dict[int, CardShare] = {}
    with ExitStack() as undo:
        driver.call("cuInit", 0)
        primary = driver.made("cuDevicePrimaryCtxRetain", device)
        undo.callback(driver.call, "cuDevicePrimaryCtxRelease_v2", device)
        whole = driver.processors(device)
        granule = driver.part(whole, 1).sms
        with driver.current(primary):
            priority = driver.least_priority()
        for share in sorted(wanted):
            sms = max(granule, int(share * whole.sms) // granule * granule) if share < 1.0 else whole.sms
            if sms not in made:
                made[sms] = _share(driver, device, sms, priority, undo)
        return CardShares(driver, list(made.values()), undo.pop_all().close)


def _share(driver: CardDriver, device: int, sms: int, priority: int, undo: ExitStack) -> CardShare:
    whole = driver.processors(device)
    part = whole if sms == whole.sms else driver.part(whole, sms)
    if part.sms > sms:
        raise CardRefused(f"cuDevSmResourceSplitByCount gave {part.sms} processors, {sms} were asked for")
    desc = driver.made("cuDevResourceGenerateDesc", part, 1)  # there is no call that ends one
    green = driver.made("cuGreenCtxCreate", desc, device, OWN_STREAM)
    undo.callback(driver.call, "cuGreenCtxDestroy", green)
    context = driver.made("cuCtxFromGreenCtx", green)
    stream = driver.made("cuGreenCtxStreamCreate", green, NON_BLOCKING, priority)
    undo.callback(driver.call, "cuStreamDestroy_v2", stream)
    return CardShare(share=sms / whole.sms, sms=sms, context=context, stream=stream)
