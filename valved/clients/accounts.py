"""Which account a process has: what is its own part of valved's time, however many users and control groups it makes.

It is the user, or for root, which is in every container, the control group. But root in a container may become any of
four billion users, and whoever may make control groups has as many as they like. So within a pod, a container or the
slice of a user's logins the outermost of these is the account of all. Such a slice is no home for root, which a user
cannot become; and root's own is nobody's, for there are the users whom root has put there (su, runuser).
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from valved.model.plain import plain

# The name of a container holds 64 digits, that of a pod its UID (valved/kube/cgroup.py).
_HOME = re.compile(
    r"/(?:[^/]*(?P<container>[0-9a-f]{64})[^/]*|(?P<logins>user-[1-9]\d*\.slice)"
    r"|(?:[^/]*-)?pod(?P<pod>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?)(?=/|$)"
)
SHOWN_DIGITS = 12  # of a container's name, as `docker ps` has them


class AccountKind(enum.Enum):
    """What an account's name is."""

    __hash__ = object.__hash__

    AWAITED = "awaited"  # the process of a service that valved knows already
    HOME = "home"  # the path of a pod's, a container's or a login's control group
    ROOT = "root"  # the control group
    USER = "user"  # its number


class LinkAccount(NamedTuple):
    """Hashed for each packet: a tuple."""

    kind: AccountKind
    name: str | int

    def called(self, pod: str = "") -> str:
        """As people know it. `pod`: the name of the pod whose home it is, where somebody knows."""
        if self.kind is AccountKind.HOME:
            return f"pod {pod}" if pod else _called(str(self.name))
        if self.kind is AccountKind.ROOT:
            return plain(f"root in the control group {self.name or '/'}")
        return f"user {self.name}" if self.kind is AccountKind.USER else f"the service of process {self.name}"


def _called(home: str) -> str:
    found = [one for one in _HOME.finditer(home) if one.end() == len(home)]
    said = found[-1] if found else None
    if said is None:
        return plain(f"the control group {home}")
    if said["container"]:
        return f"container {said['container'][:SHOWN_DIGITS]}"
    if said["pod"]:
        return f"the pod of UID {said['pod'].replace('_', '-')}"
    return f"user {said['logins'].removeprefix('user-').removesuffix('.slice')}"


def account_of(uid: int, cgroup: str) -> LinkAccount:
    home = _HOME.search(cgroup)  # the outermost: what is made inside a home is no other
    if home is not None and home["logins"] and not uid:
        home = _HOME.search(cgroup, home.end())  # but root's container there is one
    if home is not None:
        return LinkAccount(AccountKind.HOME, cgroup[: home.end()])
    return LinkAccount(AccountKind.USER, uid) if uid else LinkAccount(AccountKind.ROOT, cgroup)
