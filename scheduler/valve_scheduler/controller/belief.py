"""Whether the word of a profile that Valve measured it (`MeasuredByNode`) is believed.

An admission policy leaves that word to the controller. Between two steps of an upgrade, after a rollback or while the
policy is switched off every tenant may write it, and what was written then still stands when the policy is back. So a
profile is believed only if it was made under the policy that stands now: all that was ever written into it, the policy
has let through. Both times are the API server's."""

import logging
import math
from collections.abc import Iterable

from valve_kube import names
from valve_kube.client import ApiError, KubeClient, Unreachable
from valve_kube.objects import Object, created_at_s

from valve_scheduler.controller.profiling import is_measured

log = logging.getLogger(__name__)

POLICY = "valve-measured-profiles"  # and its binding
PARTS = ("validatingadmissionpolicies", "validatingadmissionpolicybindings")
# Every API server takes up a policy by a watch of its own, within seconds.
SETTLED_S = 60.0


class Belief:
    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._from_s: float | None = None  # None: no policy guards the word
        self._has_looked = False

    async def look(self) -> None:
        """Since when the policy stands; where the API server does not say, what it said before goes on."""
        before = self._from_s
        try:
            parts = [await self._client.request("GET", f"{names.ADMISSION_PATH}/{part}/{POLICY}") for part in PARTS]
            self._from_s = _from_s(parts)
        except ApiError as error:
            if error.status >= 500 or error.status == 429:
                return
            self._from_s = None
        except Unreachable:
            return
        if self._from_s != before or not self._has_looked:
            log.info(
                "measured profiles are believed if they were made after this time", extra={"since_s": self._from_s}
            )
        self._has_looked = True

    def covers(self, profile: Object) -> bool:
        return is_measured(profile) and self._from_s is not None and created_at_s(profile) >= self._from_s

    @property
    def since_s(self) -> float:
        """What was made earlier, by the clock of the API server, is not believed."""
        return -math.inf if self._from_s is None else self._from_s

    async def is_young(self, now_s: float) -> bool:
        """A profile that was stored now would never be believed; it is a matter of a minute. By our own clock: the code
        that stores one looks at the API server's, too."""
        if not self._has_looked:
            await self.look()
        return not self._has_looked or (self._from_s is not None and now_s < self._from_s)


def _from_s(parts: Iterable[Object]) -> float | None:
    """Of an answer that says no time nothing follows."""
    try:
        made = [created_at_s(part) for part in parts]
    except (KeyError, TypeError, ValueError):
        return None
    return max(made) + SETTLED_S if min(made) > -math.inf else None
