"""Which account a process has: what is its own part of valved's time, however many users and control groups it makes.

It is the user, or for root, which is in every container, the control group. But root in a container may become any of
four billion users, and whoever may make control groups has as many as they like. So within a pod, a container or the
slice of a user's logins the outermost of these is the account of all. Such a slice is no home for root, which a user
cannot become; and root's own is nobody's, for there are the users whom root has put there (su, runuser).
"""

from __future__ import annotations

import re
from collections.abc import Hashable

# The name of a container holds 64 digits, that of a pod its UID (valved/kube/cgroup.py).
_HOME = re.compile(
    r"/(?:[^/]*[0-9a-f]{64}[^/]*|(?P<logins>user-[1-9]\d*\.slice)"
    r"|(?:[^/]*-)?pod(?:[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?)(?=/|$)"
)


def account_of(uid: int, cgroup: str) -> Hashable:
    home = _HOME.search(cgroup)  # the outermost: what is made inside a home is no other
    if home is not None and home["logins"] and not uid:
        home = _HOME.search(cgroup, home.end())  # but root's container there is one
    if home is not None:
        return cgroup[: home.end()]
    return uid or ("root", cgroup)
