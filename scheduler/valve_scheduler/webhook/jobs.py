"""What the webhook does to a Job of offline work at creation: a move by Valve shall cost it none of its retries. Pure.

A Job counts every pod that is deleted under it as failed, unless its podFailurePolicy ignores the condition that an
eviction leaves. That policy cannot be set later, and not at all on pods that start their containers anew. It costs: the
next pod comes only when the one before has ended, which on a node that died is not seen. A Job may be left as it is.
"""

from typing import Any

from valve_kube import names
from valve_kube.objects import annotation

Job = dict[str, Any]

_EVICTED = {"type": "DisruptionTarget", "status": "True"}


def spare_retries(job: Job) -> tuple[Job, str]:
    """The Job with the policy that it lacks, and a warning where it cannot have one or has another."""
    spec = job["spec"]
    template = spec.get("template") or {}
    if annotation(template, names.ROLE) != names.OFFLINE or annotation(job, names.KEEP_JOB) == "true":
        return job, ""
    if policy := spec.get("podFailurePolicy"):
        return job, "" if any(map(_ignores_evictions, policy.get("rules") or [])) else _costs(
            job, "its podFailurePolicy has no rule that"
        )
    if (template.get("spec") or {}).get("restartPolicy") != "Never":
        return job, _costs(job, "restartPolicy is not Never, so it can have no podFailurePolicy that")
    policy = {"rules": [{"action": "Ignore", "onPodConditions": [_EVICTED]}]}
    # Required beside it: the next pod is made when the one before has ended.
    more = {"podFailurePolicy": policy, "podReplacementPolicy": "Failed"}

    return {**job, "spec": {**spec, **more}}, ""


def _ignores_evictions(rule: Job) -> bool:
    conditions = rule.get("onPodConditions") or []
    return rule.get("action") == "Ignore" and any(one.get("type") == _EVICTED["type"] for one in conditions)


def _costs(job: Job, why: str) -> str:
    left = job["spec"].get("backoffLimit", 6)
    return (
        f"each time Valve moves a pod of this Job, the Job spends one of its {left} retries: {why} "
        f"ignores the pod condition {_EVICTED['type']}"
    )
