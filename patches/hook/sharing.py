"""The rung of granted time without a call per pause (timeslice), as an engine's hook uses it.

valved opens once, on request; from then on offline work runs beside the engine's steps, in slices, and a pause is only
a wait. Each step moves the end on by a store in shared memory, no further than the stated gap after the oldest last
token: so whatever happens, no reader's wait beyond that gap is shared. Anything but a step ends it by a ring.

valved ends it, too, for reasons of its own, and says until when it stands in the control page. That word is a time: it
runs out by itself, whichever process is dead.
"""

from __future__ import annotations

from valve_hook.grant_page import GrantPage


class Sharing:
    """Of one engine loop. On an older valved, or on the gate rung, it never stands."""

    def __init__(self) -> None:
        self._page: GrantPage | None = None  # of the valved that has opened

    def begin(self, page: GrantPage, now_ns: int) -> None:
        """valved has given what was asked for. One that says no end (an older one) shares a pause, and no step."""
        self._page = page if page.by_slices and page.shared_until_ns > now_ns else None

    @property
    def is_begun(self) -> bool:
        """As far as the hook knows without looking."""
        return self._page is not None

    def stands(self, page: GrantPage | None, now_ns: int) -> bool:
        """`page`: the one of now, None without consent or valved. What valved has ended is over without a word; where
        only its time has run out, valved may yet move it on by the hook's word, which is taken back by a ring.
        """
        mine = self._page
        if mine is not None and (mine is not page or mine.shared_until_ns <= now_ns):
            self._page = None
            if mine is page and mine.shared_until_ns > 0:
                mine.ask(0)
        return self._page is not None

    def move_on(self, until_ns: int) -> None:
        """After a step; without a ring."""
        if self._page is not None:
            self._page.move_on(until_ns)

    def end(self) -> bool:
        """At once, by a ring: what comes now is no step. False: nothing was shared."""
        page, self._page = self._page, None
        if page is not None:
            page.ask(0)
        return page is not None
