"""Reads the weeks' figures from a Prometheus: range queries by the hour, over what daemons export in every mode."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from valve_kube.errors import SchedulerError

from valve_scheduler.model.curve import FloatArray
from valve_scheduler.report.worth import LEAST_SEEN_S, GpuHours, ServiceWeek

HOUR_S = 3600
MIB = 1 << 20
TIMEOUT_S = 60.0
SEEN = "sum by (node, uuid) (increase(valve_gpu_observed_seconds_total[1h]))"
IDLE = "sum by (node, uuid) (increase(valve_gpu_idle_seconds_total[1h]))"
FREE = "avg by (node, uuid) (avg_over_time(valve_gpu_offered_memory_bytes[1h]))"
FULL = "max by (node, uuid) (valve_gpu_memory_bytes)"
BUSY = "sum by (namespace, pod) (increase(valve_online_busy_seconds_total[{since}s]))"
IDLES = "sum by (namespace, pod) (increase(valve_online_idles_total[{since}s]))"
STOP = "histogram_quantile(0.99, sum by (le) (increase(valve_preemption_latency_seconds_bucket[{since}s])))"
UNINJECTED = "sum(valve_online_uninjected)"

Json = dict[str, Any]
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """Its HTTP API. `token`: sent as a bearer token where it is not empty."""

    url: str
    token: str = ""

    def matrix(self, query: str, begin_s: int, end_s: int, labels: Key) -> dict[Key, dict[int, float]]:
        """Per series its values by hour."""
        data = self._get("query_range", query=query, start=begin_s, end=end_s, step=HOUR_S)
        return {
            _key(series["metric"], labels): {
                round((float(at) - begin_s) / HOUR_S): float(v) for at, v in series["values"]
            }
            for series in data["result"]
        }

    def vector(self, query: str, at_s: int, labels: Key) -> dict[Key, float]:
        data = self._get("query", query=query, time=at_s)
        return {_key(series["metric"], labels): float(series["value"][1]) for series in data["result"]}

    def _get(self, verb: str, **parameters: str | int) -> Json:
        target = f"{self.url.rstrip('/')}/api/v1/{verb}?{urllib.parse.urlencode(parameters)}"
        request = urllib.request.Request(target)
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                found = json.load(answer)
            if found["status"] != "success":
                raise SchedulerError(f"Prometheus at {self.url}: {found.get('error', 'no reason given')}")
        except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
            raise SchedulerError(
                f"Prometheus at {self.url} cannot be asked: {error}; is --prometheus right?"
            ) from error
        data: Json = found["data"]
        return data


def _key(metric: Mapping[str, str], labels: Key) -> Key:
    return tuple(metric.get(label, "") for label in labels)


def gpu_hours(source: Prometheus, begin_s: int, end_s: int) -> list[GpuHours]:
    labels = ("node", "uuid")
    seen, idle, free, full = (source.matrix(each, begin_s, end_s, labels) for each in (SEEN, IDLE, FREE, FULL))
    hours = (end_s - begin_s) // HOUR_S + 1
    return [
        GpuHours(
            node=key[0],
            uuid=key[1],
            idle=_shares(seen[key], idle.get(key, {}), hours),
            free_mib=_row(free.get(key, {}), hours) / MIB,
            full_mib=max(full[key].values()) / MIB,
        )
        for key in sorted(seen)
        if full.get(key)
    ]


def _row(values: Mapping[int, float], hours: int) -> FloatArray:
    return np.array([values.get(hour, np.nan) for hour in range(hours)])


def _shares(seen: Mapping[int, float], idle: Mapping[int, float], hours: int) -> FloatArray:
    """An hour of which less than half was seen says nothing."""
    seen_s, idle_s = _row(seen, hours), _row(idle, hours)
    enough = np.nan_to_num(seen_s) >= LEAST_SEEN_S
    share: FloatArray = np.divide(idle_s, seen_s, out=np.full(hours, np.nan), where=enough)
    clipped: FloatArray = np.clip(share, 0.0, 1.0)
    return clipped


def services(source: Prometheus, since_s: int, end_s: int) -> Iterator[ServiceWeek]:
    labels = ("namespace", "pod")
    busy = source.vector(BUSY.format(since=since_s), end_s, labels)
    idles = source.vector(IDLES.format(since=since_s), end_s, labels)
    for namespace, pod in sorted(busy):
        key = (namespace, pod)
        yield ServiceWeek(namespace=namespace, pod=pod, busy_s=busy[key], idles=idles.get(key, 0.0))


def stop_seconds(source: Prometheus, since_s: int, end_s: int) -> float | None:
    """p99 of the stops that nodes measured; None where none has harvested."""
    found = list(source.vector(STOP.format(since=since_s), end_s, ()).values())
    return found[0] if found and np.isfinite(found[0]) and found[0] > 0 else None


def uninjected(source: Prometheus, end_s: int) -> float:
    return sum(source.vector(UNINJECTED, end_s, ()).values())
