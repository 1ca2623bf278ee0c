"""Follows the chart's pods while helm waits for them: shows each change, gives up at the first that cannot start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from valve_tools.cluster.api import ClusterApi
from valve_tools.demo.cluster_screen import Screen

Json = dict[str, Any]
# States that do not pass by waiting.
HOPELESS = frozenset(
    {"CrashLoopBackOff", "ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError"}
)
LAST_LINES = 15


class NeverStarts(RuntimeError):
    """A container of the chart cannot start; the text holds its state and the end of its log."""


@dataclass(slots=True, kw_only=True)
class PodWatch:
    api: ClusterApi
    screen: Screen
    logs: Path  # the kubelet's
    namespace: str
    _shown: dict[str, str] = field(default_factory=dict)

    def look(self) -> None:
        """Once: say what changed; NeverStarts for a container that will not come up."""
        for pod in self.api.get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]:
            name, state = pod["metadata"]["name"], state_of(pod)
            if self._shown.get(name) != state:
                self._shown[name] = state
                self.screen.say(f"[dim]{name}: {state}[/]")
            for container, reason in hopeless(pod):
                raise NeverStarts(f"{name}/{container} is in {reason}\n{self._end_of_log(pod, container)}")

    def _end_of_log(self, pod: Json, container: str) -> str:
        """Of its last attempt that said anything."""
        folder = self.logs / f"{self.namespace}_{pod['metadata']['name']}_{pod['metadata']['uid']}" / container
        for log in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True):
            lines = log.read_text(errors="replace").splitlines()
            if lines:
                return "\n".join(lines[-LAST_LINES:])
        return f"it has no log under {folder}"


def state_of(pod: Json) -> str:
    """One line: its phase, and what each container that is not ready waits for or died of."""
    status = pod.get("status") or {}
    words = [f"{name} {reason}" for name, reason in _troubles(status)]
    return ", ".join([str(status.get("phase", "Pending")), *words])


def hopeless(pod: Json) -> Iterator[tuple[str, str]]:
    return ((name, reason) for name, reason in _troubles(pod.get("status") or {}) if reason in HOPELESS)


def _troubles(status: Json) -> Iterator[tuple[str, str]]:
    for one in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        state = one.get("state") or {}
        reason = (state.get("waiting") or {}).get("reason") or (state.get("terminated") or {}).get("reason")
        if reason and reason != "Completed":
            yield one["name"], str(reason)
