"""OfflineProfiles: measured from a job's own run at several memory limits, or brought by hand.

A node's daemon gives the job one memory limit after another and counts, per limit, the tokens it made and the time it
could run. Time gated is left out on both sides, so the speed at a limit is that alone on the GPU with this memory; the
one at the highest limit is T0. Speed never falls with memory: what noise says otherwise is averaged out.
"""

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from valve_kube import names
from valve_kube.client import MERGE_PATCH, ApiError, Json, KubeClient, Unreachable, create
from valve_kube.errors import InvalidObject
from valve_kube.objects import Object, annotation, created_at_s, pod_place, workload_profile

log = logging.getLogger(__name__)

# Values of status.source. Only the controller writes the first. A former release let every tenant write "Measured":
# that is the tenant's word, like Manual.
MEASURED, BY_HAND = "MeasuredByNode", "Manual"
# Below this the first compile and a cold cache are most of what was measured.
MIN_RUNNABLE_S = 60.0
MIN_LEVELS = 3
MOST_AT_ONCE = 64  # pods of one node, as the CRD of GPUHarvestNode says
# Time enough for four levels on a GPU that is idle a third of it; another pod is tried then.
PROFILING_S = 3600.0
PROFILING_NOTE = "lent its KV memory in four steps, from a quarter to all of it, in about seven minutes of running"
GIVEN_UP_NOTE = "no three levels of memory within an hour; the next pod of the job is tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One memory limit of a profiling run, per GPU; counters since the pod's start."""

    limit_mib: float
    tokens: float
    runnable_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.runnable_s


def to_profile(pods: Iterable[Object], profiles: Collection[tuple[str, str]], now_s: float) -> dict[str, list[str]]:
    """Node -> UIDs of the pods whose daemon shall give them memory in steps: of each profile that is asked for and does
    not exist, one best-effort pod, the oldest that has not had its hour. As soon as it is placed, since steps only go
    up: an engine that has all its memory has nothing left to show."""
    first: dict[tuple[str, str], tuple[float, str, str]] = {}
    for pod in pods:
        place, name = pod_place(pod), annotation(pod, names.PROFILE)
        key = (place.namespace, name)
        made_s = created_at_s(pod)
        is_fit = place.gpu_uuids and not place.finished and not annotation(pod, names.SLA)
        if name and is_fit and key not in profiles and now_s - made_s < PROFILING_S:
            first[key] = min(first.get(key, (math.inf, "", "")), (made_s, place.uid, place.node))
    found: dict[str, list[str]] = {}
    for _, uid, node in sorted(first.values()):
        found.setdefault(node, []).append(uid)

    return {node: uids[:MOST_AT_ONCE] for node, uids in found.items()}


def is_measured(profile: Object) -> bool:
    """By the controller, from what nodes counted; an admission policy lets only the controller say so."""
    return (profile.get("status") or {}).get("source") == MEASURED


def levels_of(entry: Object) -> list[Level]:
    """What a node reports of an offline pod, the levels that ran for long enough, by rising memory."""
    found = [
        Level(
            limit_mib=float(level["limitMiB"]),
            tokens=float(level.get("usefulTokens", 0.0)),
            runnable_s=float(level.get("runnableSeconds", 0.0)),
        )
        for level in entry.get("levels") or []
    ]
    return sorted((level for level in found if level.runnable_s >= MIN_RUNNABLE_S), key=lambda level: level.limit_mib)


def is_enough(levels: Sequence[Level]) -> bool:
    return len(levels) >= MIN_LEVELS and levels[-1].tokens > 0


def curve_of(levels: Sequence[Level]) -> list[tuple[float, float]]:
    """Points (free MiB, tokens per second), never falling: neighbours that fall are pooled by their time."""
    pools: list[list[Level]] = []
    for level in levels:
        pools.append([level])
        while len(pools) > 1 and _speed(pools[-2]) > _speed(pools[-1]):
            pools[-2].extend(pools.pop())

    return [(level.limit_mib, round(_speed(pool), 3)) for pool in pools for level in pool]


def measured_spec(workload: Object, levels: Sequence[Level]) -> dict[str, Any]:
    """The spec of an OfflineProfile; what it is a profile of comes from `workload`."""
    curve = curve_of(levels)
    return {
        "workload": dict(workload),
        "standaloneTokensPerSecond": curve[-1][1],
        "curve": [{"freeMiB": free, "tokensPerSecond": speed} for free, speed in curve],
        "fitMiB": levels[0].limit_mib,
    }


def read_by_hand(text: str, namespace: str = "", home: str = "default") -> Json:
    """An OfflineProfile from YAML; raises InvalidObject with what is wrong before anything is stored."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidObject(f"the file is no YAML: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != "OfflineProfile":
        kind = found.get("kind") if isinstance(found, dict) else type(found).__name__
        raise InvalidObject(f"the file holds {kind!r}, must be one OfflineProfile")
    metadata = found.get("metadata") or {}
    if not metadata.get("name"):
        raise InvalidObject("metadata.name is missing: pods name the profile by it")
    found["metadata"] = {**metadata, "namespace": namespace or metadata.get("namespace") or home}
    if not (found.get("spec") or {}).get("curve"):
        raise InvalidObject("spec.curve is missing: at least one point {freeMiB, tokensPerSecond}")
    workload_profile({**found, "status": {"phase": "Ready"}})

    return {**found, "apiVersion": names.API_VERSION}


async def store_by_hand(client: KubeClient, text: str, namespace: str = "", home: str = "default") -> Json:
    """Create or replace the profile, then mark it Ready; the pods that wait for it are tried again within seconds."""
    profile = read_by_hand(text, namespace, home)
    await store(client, profile["metadata"], profile["spec"], {"phase": "Ready", "source": BY_HAND})

    return profile


async def store(client: KubeClient, metadata: Object, spec: Json, status: Json) -> None:
    """By a person's hand. A profile that stands and was measured is called Manual before another spec is written: under
    the controller's word only the controller may change one."""
    path = _profiles_of(metadata["namespace"])
    named = f"{path}/{metadata['name']}"
    if not await create(client, path, _profile(metadata, spec)):
        by_hand = {"status": {"source": BY_HAND}}
        await client.request("PATCH", f"{named}/status", body=by_hand, content_type=MERGE_PATCH)
        await client.request("PATCH", named, body={"spec": spec}, content_type=MERGE_PATCH)
    await client.request("PATCH", f"{named}/status", body={"status": status}, content_type=MERGE_PATCH)


async def store_measured(
    client: KubeClient, pod: Object, node: Object, levels: Sequence[Level], since_s: float = -math.inf
) -> str:
    """Under the name that the pod asks for; the note of its event, empty where nothing was stored.

    Only a profile that is made here is called measured, and only as it was made: one of that name that stands already,
    or that a person changes before its status is written, is that person's word. One that would bear a time before
    `since_s` would never be believed, nor measured anew: the API server is asked first which time it would give."""
    place, name = pod_place(pod), annotation(pod, names.PROFILE)
    workload = {"model": name, "gpuModel": node.get("gpuModel", ""), "tensorParallel": len(place.gpu_uuids)}
    spec = measured_spec(workload, levels)
    status = {"phase": "Ready", "source": MEASURED, "samples": len(levels)}
    path = _profiles_of(place.namespace)
    found = {"profile": f"{place.namespace}/{name}", "levels": len(levels)}
    try:
        wanted = _profile({"namespace": place.namespace, "name": name}, spec)
        draft = await client.request("POST", path, query={"dryRun": "All"}, body=wanted)
        if created_at_s(draft) < since_s:
            log.info("profile not stored: it would not be believed yet", extra=found)
            return ""
        made = await client.request("POST", path, body=wanted)
        version = {"resourceVersion": made["metadata"]["resourceVersion"]}
        body = {"metadata": version, "status": status}
        await client.request("PATCH", f"{path}/{name}/status", body=body, content_type=MERGE_PATCH)
    except (ApiError, Unreachable) as error:  # a person changed it, or the next round tries again
        log.info("profile not stored", extra={**found, "error": str(error)})
        return ""
    log.info("profiled", extra=found)
    speed = spec["standaloneTokensPerSecond"]

    return f"OfflineProfile {name} is Ready: {speed:g} tokens/s alone, {len(levels)} levels of memory"


def _profiles_of(namespace: str) -> str:
    return f"/apis/{names.API_VERSION}/namespaces/{namespace}/offlineprofiles"


def _profile(metadata: Object, spec: Json) -> Json:
    return {"apiVersion": names.API_VERSION, "kind": "OfflineProfile", "metadata": dict(metadata), "spec": spec}


def _speed(pool: Iterable[Level]) -> float:
    levels = list(pool)
    return sum(level.tokens for level in levels) / sum(level.runnable_s for level in levels)
