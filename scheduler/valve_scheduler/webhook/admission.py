"""What the webhook does to a pod at creation. Pure: pod in, changed pod or refusal out; applied twice it changes
nothing.

Offline pods are made what Valve can schedule, and refused when they cannot be (fail closed). Online pods get the
shim by an addition that every container survives without; on any doubt they stay exactly as they are (fail open).
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from valve_kube import names
from valve_kube.errors import InvalidObject
from valve_kube.injection import (
    ContainerTraits,
    InjectionSettings,
    PodTraits,
    Skipped,
    check_pod,
    inject,
    merge_preload,
)
from valve_kube.objects import annotation, asks_for_gpus, base_of, gpus_wanted, profile_of, resource_count, sla_of

Pod = dict[str, Any]

# Written by Valve alone: a pod that brings them was copied from a running one, or forges a placement.
_OWN = (names.GPUS, names.PREDICTED, names.DECISION)
_VOLUMES = ("valve-shim", "valve-run")
# A gated process may not end on SIGTERM before it is woken: longer waits only block the node's drain.
_MAX_GRACE_S = 30
_LOW_PRIORITY = -11
# Of one pod, init containers too: far more than any engine has, few enough to look at each.
_CONTAINERS = 256
# On pods of workloads that Kueue admits.
_KUEUE = "kueue.x-k8s.io/"


class Backend(enum.Enum):
    """How an offline container gets its GPUs: by an environment variable or by CDI devices made late on the node."""

    ENVVAR = "envvar"
    CDI = "cdi"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings(InjectionSettings):
    """The chart's values."""

    backend: Backend = Backend.ENVVAR
    runtime_class: str = "nvidia"
    version: str = ""  # of the shim that online pods get
    offline_env: Mapping[str, str] = field(default_factory=dict)  # engine timeouts that a gate would trip


class PodRefused(Exception):
    """The pod cannot run as it is; the text goes to its creator."""


def mutate_offline(pod: Pod, settings: AdmissionSettings) -> Pod:
    """The pod as Valve schedules it; raises PodRefused with what its author has to change."""
    try:
        _refuse_offline(pod)
    except InvalidObject as error:
        raise PodRefused(str(error)) from error
    changed = _opened(pod)
    spec, metadata = changed["spec"], changed["metadata"]
    metadata["labels"] = {**(metadata.get("labels") or {}), names.ROLE: names.OFFLINE}
    spec["schedulerName"] = names.SCHEDULER
    if spec.get("priorityClassName") != names.PRIORITY_CLASS and not _is_low(spec):
        spec["priorityClassName"] = names.PRIORITY_CLASS
        # Resolved from the former class already; the API server refuses values that contradict the new one.
        spec.pop("priority", None)
        spec.pop("preemptionPolicy", None)
    spec["terminationGracePeriodSeconds"] = min(spec.get("terminationGracePeriodSeconds", _MAX_GRACE_S), _MAX_GRACE_S)
    if settings.backend is Backend.ENVVAR and not spec.get("runtimeClassName"):
        spec["runtimeClassName"] = settings.runtime_class
    if not resource_count(pod, names.RESOURCE):
        _claim(spec["containers"][0], int(annotation(pod, names.GPUS_REQUIRED).lstrip("0") or 1))  # was read above
    for container in _containers(changed):
        _devices(container, settings)
        if _limit(container, names.RESOURCE):
            _offline_env(container, settings)
    tolerations = spec.get("tolerations") or []
    if not any(t.get("key") in (None, "", names.ONLINE_RESOURCE) for t in tolerations):
        ours = {"key": names.ONLINE_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}
        spec["tolerations"] = [*tolerations, ours]

    return changed


def mutate_online(pod: Pod, settings: AdmissionSettings) -> Pod:
    """The pod with the shim preloaded in its GPU containers; raises Skipped with the reason where it must not be."""
    check_pod(_traits(pod), settings)
    if len(_containers(pod)) > _CONTAINERS:
        raise Skipped("too-many-containers")
    changed = _opened(pod)
    volumes = changed["spec"]["volumes"] = list(pod["spec"].get("volumes") or [])
    present = {volume["name"] for volume in volumes}
    for name, (folder, _) in zip(_VOLUMES, settings.mounts, strict=True):
        if name not in present:
            # DirectoryOrCreate: on a node without Valve the pod still starts, and ld.so ignores the missing file.
            volumes.append({"name": name, "hostPath": {"path": folder, "type": "DirectoryOrCreate"}})
    wish = annotation(pod, names.INJECT)
    for container in _containers(changed):
        if asks_for_gpus(container):
            _inject(container, wish, settings)
    metadata = changed["metadata"]
    metadata["labels"] = {**(metadata.get("labels") or {}), names.ROLE: names.ONLINE}
    metadata["annotations"] = {**(metadata.get("annotations") or {}), names.SHIM: settings.version}

    return marked(changed, "ok")


def marked(pod: Pod, injection: str) -> Pod:
    """The pod with its injection mark, which the daemon compares with what it sees."""
    metadata = pod["metadata"]
    annotations = {**(metadata.get("annotations") or {}), names.INJECTION: injection}

    return {**pod, "metadata": {**metadata, "annotations": annotations}}


def _opened(pod: Pod) -> Pod:
    """The pod with parts of its own where it is changed; what lies deeper is shared with the one that came, and is
    replaced, never written to: a pod may be of megabytes."""
    spec = dict(pod["spec"])
    for kind in ("initContainers", "containers"):
        if spec.get(kind):
            spec[kind] = [dict(container) for container in spec[kind]]

    return {**pod, "metadata": dict(pod["metadata"]), "spec": spec}


def _is_low(spec: Pod) -> bool:
    """A class of the pod's own below anything that a cluster autoscaler would buy a node for; the API server has
    resolved it before the webhook is asked."""
    priority = spec.get("priority")
    return bool(spec.get("priorityClassName")) and isinstance(priority, int) and priority <= _LOW_PRIORITY


def _refuse_offline(pod: Pod) -> None:
    spec, metadata = pod["spec"], pod["metadata"]
    if (count := len(_containers(pod))) > _CONTAINERS:
        raise PodRefused(f"the pod has {count} containers, init containers among them; at most {_CONTAINERS} are taken")
    _refuse_other_gpus(pod)
    told = [
        metadata[kind][names.ROLE] for kind in ("labels", "annotations") if names.ROLE in (metadata.get(kind) or {})
    ]
    if len(set(told)) > 1:
        raise PodRefused(f"label {names.ROLE} says {told[0]} and the annotation {told[1]}; one of the two is enough")
    forged = [key for key in _OWN if key in (metadata.get("annotations") or {})]
    if forged:
        raise PodRefused(f"annotation {forged[0]} is written by Valve alone; remove it")
    scheduler = spec.get("schedulerName") or "default-scheduler"
    if scheduler not in ("default-scheduler", names.SCHEDULER):
        raise PodRefused(f"schedulerName is {scheduler}; offline pods are placed by {names.SCHEDULER}, leave it out")
    if spec.get("nodeName"):
        raise PodRefused("nodeName is set; offline pods are placed by Valve, use nodeSelector or affinity instead")
    if spec.get("hostPID"):
        raise PodRefused("hostPID is not allowed: the daemon tells pods apart by their processes")
    for container in _containers(pod):
        if (container.get("securityContext") or {}).get("privileged"):
            raise PodRefused(f"container {container['name']} is privileged: it would reach GPUs it was not given")
    sla_of(pod)
    base_of(pod)
    profile_of(pod)
    if resource_count(pod, names.RESOURCE) or annotation(pod, names.GPUS_REQUIRED):
        gpus_wanted(pod)
    by_kueue = any(key.startswith(_KUEUE) for key in metadata.get("labels") or {})
    if by_kueue and annotation(pod, names.GPUS_REQUIRED) and not resource_count(pod, names.RESOURCE):
        raise PodRefused(
            f"Kueue does not count the annotation {names.GPUS_REQUIRED}; write the limit {names.RESOURCE} instead"
        )
    if annotation(pod, names.SLA) and not annotation(pod, names.PROFILE):
        raise PodRefused(f"annotation {names.SLA} needs {names.PROFILE}: the name of an OfflineProfile to compare with")


def _refuse_other_gpus(pod: Pod) -> None:
    for resource in names.ONLINE_RESOURCES:
        if resource_count(pod, resource):
            raise PodRefused(f"an offline pod must not ask for {resource}; ask for {names.RESOURCE} instead")
    if pod["spec"].get("resourceClaims"):
        raise PodRefused("an offline pod must not bring resourceClaims: Valve cannot count the devices behind them")


def _traits(pod: Pod) -> PodTraits:
    spec = pod["spec"]
    return PodTraits(
        wish=annotation(pod, names.INJECT),
        has_gpu=any(map(asks_for_gpus, _containers(pod))),
        host_pid=bool(spec.get("hostPID")),
        runtime=spec.get("runtimeClassName") or "",
        os=(spec.get("os") or {}).get("name", ""),
    )


def _inject(container: Pod, wish: str, settings: AdmissionSettings) -> None:
    variable = _variable(container, "LD_PRELOAD")
    hidden = ""
    if variable is not None and "valueFrom" in variable:
        hidden = "ld-preload-from-reference"
    elif variable is None and container.get("envFrom") and wish != "true":
        hidden = "env-from"  # it may hold an LD_PRELOAD that ours would override; `inject: "true"` says it does not
    mounts = container.get("volumeMounts") or []
    ours = dict(zip(_VOLUMES, (source for source, _ in settings.mounts), strict=True))
    traits = ContainerTraits(
        preload=(variable or {}).get("value") or "",
        hidden=hidden,
        mounts={mount["mountPath"]: ours.get(mount["name"], mount["name"]) for mount in mounts},
    )
    injection = inject(traits, settings)
    if injection.preload is not None:
        _set_variable(container, "LD_PRELOAD", injection.preload)
    volume_of = {source: name for name, source in ours.items()}
    more = [{"name": volume_of[source], "mountPath": path, "readOnly": True} for source, path in injection.mounts]
    if more:
        container["volumeMounts"] = [*mounts, *more]


def _devices(container: Pod, settings: AdmissionSettings) -> None:
    """Always as Valve says, over whatever pod or image had: a CUDA image says "all", which the runtime of the pod would
    give to its sidecar."""
    visible: Pod = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
    if settings.backend is Backend.ENVVAR and _limit(container, names.RESOURCE):
        field_path = f"metadata.annotations['{names.GPUS}']"
        reference = {"apiVersion": "v1", "fieldPath": field_path}
        visible = {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": reference}}
    present = container.get("env") or []
    first = next((place for place, entry in enumerate(present) if entry["name"] == visible["name"]), 0)
    others = (entry for entry in present[first:] if entry["name"] != visible["name"])
    container["env"] = [*present[:first], visible, *others]


def _offline_env(container: Pod, settings: AdmissionSettings) -> None:
    """Settings of engines, only where the pod has none, and the shim."""
    present = {entry["name"] for entry in container["env"]}
    more = [{"name": key, "value": value} for key, value in settings.offline_env.items() if key not in present]
    container["env"] += more
    # In the pod, as its own variables win over the device plugin's; the file comes with the plugin's mount.
    preload = _variable(container, "LD_PRELOAD") or {}
    if "valueFrom" in preload:
        raise PodRefused(
            f"container {container['name']} takes LD_PRELOAD from a reference; write its value into the pod"
        )
    merged = merge_preload(preload.get("value") or "", settings.preload)
    if merged is not None:
        _set_variable(container, "LD_PRELOAD", merged)


def _claim(container: Pod, count: int) -> None:
    resources = container.get("resources") or {}
    more = {kind: {**(resources.get(kind) or {}), names.RESOURCE: str(count)} for kind in ("limits", "requests")}
    container["resources"] = {**resources, **more}


def _containers(pod: Pod) -> list[Pod]:
    spec = pod["spec"]
    return [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]


def _limit(container: Pod, resource: str) -> str:
    limits = (container.get("resources") or {}).get("limits") or {}
    text = str(limits.get(resource, "0"))

    return "" if text == "0" else text


def _variable(container: Pod, name: str) -> Pod | None:
    found: Pod | None = next((entry for entry in container.get("env") or [] if entry["name"] == name), None)
    return found


def _set_variable(container: Pod, name: str, value: str) -> None:
    present = container.get("env") or []
    first = next((place for place, entry in enumerate(present) if entry["name"] == name), len(present))
    before = present[first] if first < len(present) else {"name": name}
    container["env"] = [*present[:first], {**before, "value": value}, *present[first + 1 :]]
