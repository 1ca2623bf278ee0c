"""Admission: offline pods become schedulable or are refused, online pods are injected or left exactly as they are."""

import base64
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonpatching import apply
from valve_kube import names
from valve_kube.access import Access
from valve_kube.client import KubeClient
from valve_kube.injection import Skipped
from valve_scheduler.webhook.admission import (
    AdmissionSettings,
    Backend,
    PodRefused,
    mutate_offline,
    mutate_online,
)
from valve_scheduler.webhook.jsonpatch import diff
from valve_scheduler.webhook.service import Webhook, WebhookSettings, review_job, review_offline, review_online

Pod = dict[str, Any]
SETTINGS = AdmissionSettings(offline_env={"VLLM_ENGINE_ITERATION_TIMEOUT_S": "3600"})
SHIM = SETTINGS.preload


def pod(*containers: Pod, annotations: dict[str, str] | None = None, **spec: Any) -> Pod:
    given = list(containers) or [container()]
    return {"metadata": {"name": "p", "annotations": annotations or {}}, "spec": {"containers": given, **spec}}


def labelled(given: Pod, role: str) -> Pod:
    return given | {"metadata": given["metadata"] | {"labels": {names.ROLE: role}}}


def container(resource: str = names.RESOURCE, count: str = "1", **more: Any) -> Pod:
    return {"name": "work", "image": "i", "resources": {"limits": {resource: count}}, **more}


def online(**more: Any) -> Pod:
    return container(names.ONLINE_RESOURCE, **more)


def test_an_offline_pod_gets_all_that_it_takes_to_be_placed() -> None:
    changed = mutate_offline(pod(priority=0, preemptionPolicy="PreemptLowerPriority"), SETTINGS)

    spec = changed["spec"]
    assert changed["metadata"]["labels"] == {names.ROLE: names.OFFLINE}
    assert (spec["schedulerName"], spec["priorityClassName"]) == ("valve-scheduler", "valve-offline")
    assert "priority" not in spec
    assert "preemptionPolicy" not in spec
    assert (spec["runtimeClassName"], spec["terminationGracePeriodSeconds"]) == ("nvidia", 30)
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert spec["containers"][0]["env"] == [
        {
            "name": "NVIDIA_VISIBLE_DEVICES",
            "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations['valve.gpu/gpus']"}},
        },
        {"name": "VLLM_ENGINE_ITERATION_TIMEOUT_S", "value": "3600"},
        {"name": "LD_PRELOAD", "value": SHIM},
    ]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"priorityClassName": "batch-low", "priority": -11}, "batch-low"),
        ({"priorityClassName": "batch-lowest", "priority": -1_000}, "batch-lowest"),
        ({"priorityClassName": "batch", "priority": -10}, names.PRIORITY_CLASS),
        ({"priorityClassName": "online", "priority": 1_000}, names.PRIORITY_CLASS),
        ({"priorityClassName": "unresolved"}, names.PRIORITY_CLASS),
        ({"priority": -50}, names.PRIORITY_CLASS),
    ],
)
def test_a_class_of_its_own_is_kept_below_what_nodes_are_bought_for_and_never_above(given: Pod, kept: str) -> None:
    spec = mutate_offline(pod(**given), SETTINGS)["spec"]

    assert spec["priorityClassName"] == kept
    assert spec.get("priority") == (given["priority"] if kept != names.PRIORITY_CLASS else None)


def test_gpus_that_kueue_cannot_count_are_refused() -> None:
    counted = {"name": "work"}
    under_kueue = pod(counted, annotations={names.GPUS_REQUIRED: "2"})
    under_kueue["metadata"]["labels"] = {"kueue.x-k8s.io/podset": "main"}

    with pytest.raises(PodRefused, match="write the limit"):
        mutate_offline(under_kueue, SETTINGS)


def test_devices_are_as_valve_says_whatever_the_pod_says() -> None:
    forged = container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "A", "value": "1"}])

    env = mutate_offline(pod(forged), AdmissionSettings(backend=Backend.CDI))["spec"]["containers"][0]["env"]

    assert env == [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},
        {"name": "A", "value": "1"},
        {"name": "LD_PRELOAD", "value": SHIM},
    ]


def test_an_offline_containers_own_preload_stays_behind_ours() -> None:
    """Its own variable would win over the device plugin's, and it would run without the shim."""
    own = container(env=[{"name": "LD_PRELOAD", "value": "/usr/lib/libjemalloc.so"}])

    once = mutate_offline(pod(own), SETTINGS)

    assert {"name": "LD_PRELOAD", "value": f"{SHIM}:/usr/lib/libjemalloc.so"} in once["spec"]["containers"][0]["env"]
    assert mutate_offline(once, SETTINGS) == once


def test_a_sanitizers_runtime_stays_in_front_of_ours() -> None:
    """With anything before it, it ends the program."""
    own = container(env=[{"name": "LD_PRELOAD", "value": "/usr/lib/libjemalloc.so:/usr/lib/libasan.so.8"}])

    once = mutate_offline(pod(own), SETTINGS)

    value = f"/usr/lib/libasan.so.8:{SHIM}:/usr/lib/libjemalloc.so"
    assert {"name": "LD_PRELOAD", "value": value} in once["spec"]["containers"][0]["env"]


def test_the_cdi_backend_needs_no_runtime_class() -> None:
    assert "runtimeClassName" not in mutate_offline(pod(), AdmissionSettings(backend=Backend.CDI))["spec"]


def test_a_pod_that_names_no_resource_gets_as_many_gpus_as_its_annotation_says() -> None:
    bare = {"name": "work", "image": "i"}

    changed = mutate_offline(pod(bare, annotations={names.GPUS_REQUIRED: "2"}), SETTINGS)

    wanted = {names.RESOURCE: "2"}
    assert changed["spec"]["containers"][0]["resources"] == {"limits": wanted, "requests": wanted}


def test_a_sidecar_of_an_online_pod_stays_as_it_is() -> None:
    sidecar = {"name": "log", "image": "alpine"}

    assert mutate_online(pod(online(), sidecar), SETTINGS)["spec"]["containers"][1] == sidecar


def test_a_sidecar_of_an_offline_pod_gets_no_gpu_whatever_its_image_says() -> None:
    """The runtime class is the pod's, and CUDA images carry NVIDIA_VISIBLE_DEVICES=all."""
    sidecar = {"name": "log", "image": "nvidia/cuda", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {}}]}

    changed = mutate_offline(pod(container(), sidecar), SETTINGS)["spec"]["containers"][1]

    assert changed == sidecar | {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (pod(online()), "must not ask for nvidia.com/gpu"),
        (pod(container(), container(names.ONLINE_RESOURCE)), "must not ask for nvidia.com/gpu"),
        (pod(annotations={names.GPUS: "GPU-a"}), "written by Valve alone"),
        (pod(annotations={names.SLA: "1.5", names.PROFILE: "x"}), "must be a number in"),
        (pod(annotations={names.SLA: "0.5"}), "needs valve.gpu/profile"),
        (pod(annotations={names.GPUS_REQUIRED: "9"}), "must be 1 to 8"),
        (pod(annotations={names.GPUS_REQUIRED: "8"}), "quotas and slots go by the limit"),
        (pod(container(count="x")), "must be a whole number"),
        (pod(container(securityContext={"privileged": True})), "is privileged"),
        (pod(hostPID=True), "hostPID is not allowed"),
        (pod(container(env=[{"name": "LD_PRELOAD", "valueFrom": {}}])), "write its value into the pod"),
        (pod(nodeName="n1"), "nodeName is set"),
        (labelled(pod(annotations={names.ROLE: "online"}), "offline"), "says offline and the annotation online"),
        (labelled(pod(annotations={names.ROLE: "offline"}), "online"), "says online and the annotation offline"),
        (pod(schedulerName="volcano"), "schedulerName is volcano"),
        (pod(initContainers=[container(securityContext={"privileged": True})]), "is privileged"),
    ],
)
def test_an_offline_pod_that_cannot_run_is_refused_with_the_cure(bad: Pod, why: str) -> None:
    with pytest.raises(PodRefused, match=why):
        mutate_offline(bad, SETTINGS)


def test_an_online_pod_gets_the_shim_read_only_and_optional() -> None:
    changed = mutate_online(pod(online()), SETTINGS)

    work = changed["spec"]["containers"][0]
    assert work["env"] == [{"name": "LD_PRELOAD", "value": SHIM}]
    assert [(mount["mountPath"], mount["readOnly"]) for mount in work["volumeMounts"]] == [
        ("/var/lib/valve/shim", True),
        ("/run/valve", True),
    ]
    assert [volume["hostPath"] for volume in changed["spec"]["volumes"]] == [
        {"path": "/var/lib/valve/shim", "type": "DirectoryOrCreate"},
        {"path": "/run/valve/client", "type": "DirectoryOrCreate"},
    ]
    assert changed["metadata"]["annotations"][names.INJECTION] == "ok"
    assert "schedulerName" not in changed["spec"]


def test_a_preload_of_its_own_stays_behind_ours() -> None:
    own = online(env=[{"name": "LD_PRELOAD", "value": "/usr/lib/libjemalloc.so"}])

    env = mutate_online(pod(own), SETTINGS)["spec"]["containers"][0]["env"]

    assert env == [{"name": "LD_PRELOAD", "value": f"{SHIM}:/usr/lib/libjemalloc.so"}]


@pytest.mark.parametrize(
    ("left_alone", "why"),
    [
        (pod(online(), annotations={names.INJECT: "false"}), "opt-out"),
        (pod({"name": "a", "image": "i"}), "no-gpu"),
        (pod(online(), hostPID=True), "host-pid"),
        (pod(online(), runtimeClassName="gvisor"), "sandboxed-runtime"),
        (pod(online(), os={"name": "windows"}), "windows"),
        (pod(online(env=[{"name": "LD_PRELOAD", "valueFrom": {}}])), "ld-preload-from-reference"),
        (pod(online(envFrom=[{"configMapRef": {"name": "c"}}])), "env-from"),
        (pod(online(volumeMounts=[{"name": "mine", "mountPath": "/run/valve/"}])), "mount-path-taken"),
    ],
)
def test_an_online_pod_in_doubt_is_left_alone_with_the_reason(left_alone: Pod, why: str) -> None:
    with pytest.raises(Skipped, match=f"^{why}$"):
        mutate_online(left_alone, SETTINGS)

    response = review_online({"uid": "u", "object": left_alone}, SETTINGS)
    patched = apply(left_alone, json.loads(base64.b64decode(response["patch"])))

    assert response["allowed"]
    assert patched["spec"] == left_alone["spec"]
    assert patched["metadata"]["annotations"][names.INJECTION] == f"skipped-{why}"


def test_a_pod_that_vouches_for_its_references_is_injected() -> None:
    given = pod(online(envFrom=[{"configMapRef": {"name": "c"}}]), annotations={names.INJECT: "true"})

    assert mutate_online(given, SETTINGS)["spec"]["containers"][0]["env"][0]["value"] == SHIM


@pytest.mark.parametrize("broken", [{}, {"metadata": {}}, {"metadata": {}, "spec": {"containers": [{}]}}, None, []])
def test_an_online_pod_nobody_can_read_is_allowed_untouched(broken: Any) -> None:
    response = review_online({"uid": "u", "object": broken}, SETTINGS)

    assert response["allowed"]


def test_an_offline_review_refuses_with_a_message_or_patches() -> None:
    why = "valve: hostPID is not allowed: the daemon tells pods apart by their processes"

    refused = review_offline({"uid": "u", "object": pod(hostPID=True)}, SETTINGS)
    allowed = review_offline({"uid": "u", "object": pod()}, SETTINGS)

    assert refused == {
        "uid": "u",
        "allowed": False,
        "status": {
            "code": 403,
            "message": why,
        },
    }
    assert allowed["patchType"] == "JSONPatch"
    assert apply(pod(), json.loads(base64.b64decode(allowed["patch"]))) == mutate_offline(pod(), SETTINGS)


PODS = [pod(), pod(container(env=[]), annotations={names.GPUS_REQUIRED: "1"}), pod(initContainers=[container()])]
ONLINE_PODS = [
    pod(online()),
    pod(online(env=[{"name": "LD_PRELOAD", "value": "/a.so"}], volumeMounts=[{"name": "v", "mountPath": "/v"}])),
]


@pytest.mark.parametrize("given", PODS)
def test_an_offline_pod_is_changed_once(given: Pod) -> None:
    """reinvocationPolicy IfNeeded sends pods twice."""
    once = mutate_offline(given, SETTINGS)

    assert diff(once, mutate_offline(once, SETTINGS)) == []


@pytest.mark.parametrize("given", ONLINE_PODS)
def test_an_online_pod_is_changed_once(given: Pod) -> None:
    once = mutate_online(given, SETTINGS)

    assert diff(once, mutate_online(once, SETTINGS)) == []


@pytest.mark.parametrize("given", [*PODS, *ONLINE_PODS])
def test_the_pod_that_came_in_is_never_changed(given: Pod) -> None:
    before = copy.deepcopy(given)
    mutate_online(given, SETTINGS) if given in ONLINE_PODS else mutate_offline(given, SETTINGS)

    assert given == before


values = st.recursive(
    st.none() | st.integers(0, 3) | st.text("a/~", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/~", max_size=2), inner, max_size=3),
    max_leaves=12,
)


@given(before=values, after=values)
def test_a_patch_leads_from_any_value_to_any_other(before: Any, after: Any) -> None:
    assert apply(before, diff(before, after)) == after


@given(value=values)
def test_nothing_to_do_needs_no_operation(value: Any) -> None:
    assert diff(value, copy.deepcopy(value)) == []


@given(
    before=st.lists(st.dictionaries(st.text("ab", max_size=1), st.integers(0, 3)), max_size=6),
    kept=st.lists(st.integers(0, 8), max_size=8),
    own=values,
)
def test_a_patch_of_a_list_that_shares_elements_leads_there(before: list[Any], kept: list[int], own: Any) -> None:
    """In whatever order and however often: what is not among them stands for an element of its own."""
    after = [before[place] if place < len(before) else own for place in kept]

    assert apply(before, diff(before, after)) == after


def test_a_patch_never_names_what_it_leaves_where_it_is() -> None:
    """One variable before ten thousand others was a patch of all of them."""
    before = [{"name": str(number)} for number in range(10_000)]
    first, last, changed = {"name": "first"}, {"name": "last"}, {"name": "changed"}

    assert diff(before, [first, *before[:7], changed, *before[8:], last]) == [
        {"op": "add", "path": "/0", "value": first},
        {"op": "replace", "path": "/8/name", "value": "changed"},
        {"op": "add", "path": "/-", "value": last},
    ]


def answer(path: str, body: Any) -> tuple[int, Any]:
    from datetime import datetime, timezone

    client = KubeClient(Access(host="127.0.0.1", port=1, tls=None, authorization=str))
    webhook = Webhook(client, WebhookSettings(), lambda: datetime.now(timezone.utc))
    found = webhook.judge(path, json.dumps(body).encode())

    return found.status, found.body


def test_a_review_comes_back_with_its_kind_and_uid() -> None:
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "u", "object": pod()}}

    status, body = answer("/mutate/offline", review)

    found = json.loads(body)
    assert status == 200
    assert (found["kind"], found["response"]["uid"], found["response"]["allowed"]) == ("AdmissionReview", "u", True)


def test_unknown_paths_are_404() -> None:
    assert answer("/mutate/other", {})[0] == 404


IGNORED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def job(role: str = names.OFFLINE, restarts: str = "Never", **spec: Any) -> Pod:
    metadata = {"annotations": {names.ROLE: role}}
    return {
        "spec": {"backoffLimit": 2, "template": {"metadata": metadata, "spec": {"restartPolicy": restarts}}, **spec}
    }


def reviewed_job(given: Pod) -> tuple[Pod, list[str]]:
    answer = review_job({"uid": "u", "object": given}, SETTINGS)
    assert answer["allowed"]
    operations = json.loads(base64.b64decode(answer["patch"])) if "patch" in answer else []

    return apply(given, operations), answer.get("warnings", [])


def test_an_offline_job_never_spends_a_retry_on_a_move_for_want_of_a_policy() -> None:
    changed, warnings = reviewed_job(job())

    assert warnings == []
    assert changed["spec"]["podFailurePolicy"] == {"rules": [IGNORED]}
    assert changed["spec"]["podReplacementPolicy"] == "Failed"
    assert reviewed_job(changed) == (changed, [])


@pytest.mark.parametrize(
    "given",
    [
        job(restarts="OnFailure"),
        job(podFailurePolicy={"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [3]}}]}),
    ],
)
def test_a_job_that_will_spend_retries_is_told_so_and_stays_as_it_is(given: Pod) -> None:
    changed, (warning,) = reviewed_job(given)

    assert changed == given
    assert "one of its 2 retries" in warning


@pytest.mark.parametrize(
    "given",
    [
        job(role=names.ONLINE),
        job(podFailurePolicy={"rules": [IGNORED]}),
        {"spec": {"template": {}}},
    ],
)
def test_other_jobs_and_those_with_the_rule_are_left_alone_in_silence(given: Pod) -> None:
    assert reviewed_job(given) == (given, [])


def test_a_job_that_cannot_be_read_is_let_in() -> None:
    assert review_job({"uid": "u", "object": {"spec": None}}, SETTINGS) == {"uid": "u", "allowed": True}


@pytest.mark.parametrize("restarts", ["Never", "OnFailure"])
def test_a_job_that_says_so_never_has_to_wait_for_the_end_of_a_pod_on_a_dead_node(restarts: str) -> None:
    """Its own ways stay, and nobody warns it of what it chose."""
    given = {**job(restarts=restarts), "metadata": {"annotations": {names.KEEP_JOB: "true"}}}

    assert reviewed_job(given) == (given, [])


def test_any_other_word_never_costs_a_job_its_retries() -> None:
    changed, _ = reviewed_job({**job(), "metadata": {"annotations": {names.KEEP_JOB: "false"}}})

    assert changed["spec"]["podFailurePolicy"] == {"rules": [IGNORED]}
