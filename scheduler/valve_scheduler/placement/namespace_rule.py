"""Why policies let a namespace have no harvested GPUs, or no more: one rule for the extender and for people. Pure."""

from valve_kube.objects import OfflinePod

from valve_scheduler.placement.state import ClusterState


def barred(state: ClusterState, pod: OfflinePod) -> str:
    """Empty when nothing stands in the pod's way.

    For kube-scheduler an error, not a refusal: it then tries again by itself, as no event tells that a pod of the
    namespace ended elsewhere.
    """
    policies = state.policies
    if policies.brake or policies.paused({}):  # each node's own word takes its time
        return "a HarvestPolicy pauses harvesting on every node"
    rule = policies.rule(pod.namespace)
    if rule.mode in ("off", "observe"):
        return f"a HarvestPolicy sets mode {rule.mode} for namespace {pod.namespace}"
    if rule.max_gpus is not None:
        used = state.held.in_use(pod.namespace, but=pod.uid)
        if used + pod.gpus > rule.max_gpus:
            most = f"{rule.max_gpus} harvested GPUs its HarvestPolicy allows"
            return f"namespace {pod.namespace} uses {used} of the {most}"

    return ""
