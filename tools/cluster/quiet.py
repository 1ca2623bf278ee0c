"""What a process of Valve must never leave behind, where Kubernetes would start it again and nobody would look.

Extender and controller once died about once a minute while every test was green: the kubelet had them back before a
test asked for anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
# One JSON object a line in the logs of Valve, tracebacks of an interpreter that ends as they come.
_COMPLAINT = re.compile(r'"level": "(?:error|critical)"|Traceback \(most recent call last\)|Fatal Python error')
_MOST = 400  # characters of a line that are shown


def complaints(log: str, expected: Sequence[str] = ()) -> Iterator[str]:
    """Lines of level error and tracebacks, but those in which one of the patterns is found."""
    for line in log.splitlines():
        if _COMPLAINT.search(line) and not any(re.search(pattern, line) for pattern in expected):
            yield line[:_MOST]


def of_file(path: Path, expected: Sequence[str] = ()) -> Iterator[str]:
    return (f"{path.name}: {line}" for line in complaints(path.read_text(errors="replace"), expected))


def restarts(pods: Iterable[Json]) -> dict[str, int]:
    """Of each container that was started again: how often."""
    return {
        f"{pod['metadata']['name']}/{one['name']}": one["restartCount"]
        for pod in pods
        for kind in ("initContainerStatuses", "containerStatuses")
        for one in (pod.get("status") or {}).get(kind) or []
        if one["restartCount"]
    }


def why_restarted(pods: Iterable[Json]) -> Iterator[str]:
    """The last end of each such container, as its kubelet tells it."""
    for pod in pods:
        for one in (pod.get("status") or {}).get("containerStatuses") or []:
            if one["restartCount"]:
                ended = (one.get("lastState") or {}).get("terminated") or {}
                told = f"{ended.get('reason')} {ended.get('exitCode')} {ended.get('message') or ''}".strip()
                yield f"{pod['metadata']['name']}/{one['name']} restarted {one['restartCount']} times, last: {told}"
