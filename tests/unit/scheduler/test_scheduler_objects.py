"""What users and nodes write: read where it can be used, refused by field and value where not."""

import contextlib
import re

import pytest
from reports import harvest_node, pod
from valve_kube import names
from valve_kube.errors import InvalidObject
from valve_kube.objects import node_report, offline_pod, pod_place, workload_profile
from valve_kube.owners import owner_name
from valve_scheduler.webhook.admission import AdmissionSettings, PodRefused, mutate_offline


def test_a_pod_is_read_with_its_owner_and_wishes() -> None:
    wish = offline_pod(pod(gpus=2, annotations={names.SLA: "0.30", names.PROFILE: "llama"}, owner="job-1"))

    assert (wish.gpus, wish.sla, wish.profile, wish.owner_uid) == (2, 0.3, "llama", "job-1")


def test_a_pod_without_sla_is_best_effort_and_its_own_owner() -> None:
    wish = offline_pod(pod())

    assert (wish.sla, wish.owner_uid) == (0.0, "uid-p1")


@pytest.mark.parametrize(
    ("owner", "labels", "name"),
    [
        (None, {"pod-template-hash": "7d9c"}, "p1"),
        ({"name": "nightly", "controller": True}, {}, "nightly"),
        ({"name": "chat-7d9c", "controller": True}, {"pod-template-hash": "7d9c"}, "chat"),
        ({"name": "watches-it"}, {}, "p1"),
    ],
)
def test_a_pod_is_called_after_its_job_or_deployment(owner: object, labels: dict[str, str], name: str) -> None:
    metadata = {"name": "p1", "labels": labels, "ownerReferences": [owner] if owner else []}

    assert owner_name({"metadata": metadata}) == name


@pytest.mark.parametrize("text", ["0", "-0.1", "1.01", "30%", "nan", "inf", "", " "])
def test_an_sla_outside_its_range_is_refused_with_its_value(text: str) -> None:
    given = pod(annotations={names.SLA: text})
    if not text:
        assert offline_pod(given).sla == 0.0
        return

    with pytest.raises(InvalidObject, match=re.escape(f"is {text!r}, must be a number in (0, 1]")):
        offline_pod(given)


@pytest.mark.parametrize("gpus", ["0", "9", "x", "-1", "1.5"])
def test_a_gpu_count_no_node_can_serve_is_refused(gpus: str) -> None:
    with pytest.raises(InvalidObject, match=names.RESOURCE):
        offline_pod(pod(gpus=gpus))


def test_an_annotation_that_says_more_than_the_limit_is_refused() -> None:
    """The quota counted the limit; an annotation can be changed after that."""
    with pytest.raises(InvalidObject, match="quotas and slots go by the limit"):
        offline_pod(pod(gpus=1, annotations={names.GPUS_REQUIRED: "8"}))


def test_init_containers_count_by_the_largest_and_containers_by_the_sum() -> None:
    given = pod(gpus=2)
    limits = {"resources": {"limits": {names.RESOURCE: "3"}}}
    given["spec"]["initContainers"] = [limits, limits]

    assert offline_pod(given).gpus == 3


def test_a_place_is_read_whatever_else_the_pod_says() -> None:
    place = pod_place(pod(gpus="x", annotations={names.SLA: "9"}, node="n1", held="GPU-a,GPU-b"))

    assert (place.node, place.gpu_uuids, place.finished) == ("n1", ("GPU-a", "GPU-b"), False)


def test_a_report_is_read_into_rows() -> None:
    report = node_report(harvest_node(idle=0.25, cards=2))

    assert report.idle.tolist() == [0.25, 0.25] + [0.0] * 6
    assert report.alignment[0, 1] == 1.0
    assert report.alignment[2, 3] == 0.0  # no such GPUs, so never a set
    assert report.histogram[0].sum() == 1.0


def test_the_longest_window_of_idle_time_is_taken() -> None:
    given = harvest_node()
    given["status"]["gpus"][0]["idle"] = {"1m": 0.1, "10m": 0.2}

    assert node_report(given).idle[0] == 0.2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alignment", [1.0]),
        ("alignment", [2.0] * 28),
        ("observedAt", "yesterday"),
        ("memoryMiB", None),
        ("gpus", [{"uuid": "GPU-a"}]),
        ("gpus", [{"uuid": "GPU-a", "idle": {"1h": 1.5}, "freeMemory": [1.0] * 32}]),
        ("gpus", [{"uuid": "GPU-a", "idle": {"1h": 0.5}, "freeMemory": [1.0] * 31}]),
        ("gpus", [{"uuid": "GPU-a", "idle": {"1h": 0.5}, "freeMemory": [-1.0] * 32}]),
        ("gpus", [{"uuid": f"GPU-{gpu}", "idle": {}, "freeMemory": [1.0] * 32} for gpu in range(9)]),
    ],
)
def test_a_report_with_an_impossible_part_is_refused_as_a_whole(field: str, value: object) -> None:
    with pytest.raises(InvalidObject, match="GPUHarvestNode n1"):
        node_report(harvest_node(**{field: value}))


def online_memory(bin_: int, rest: float = 0.0) -> list[float]:
    """Online is in this bin of the card nearly always, and in the highest one for the rest of the time."""
    return [1.0 - rest if place == bin_ else rest if place == 31 else 0.0 for place in range(32)]


@pytest.mark.parametrize(
    ("told", "peak_mib"),
    [
        (None, 0.0),
        ({}, 0.0),
        ({"1h": online_memory(7)}, 20_000.0),
        ({"1h": online_memory(7), "24h": online_memory(15)}, 40_000.0),
        ({"1h": online_memory(15), "24h": online_memory(7)}, 40_000.0),
        ({"1h": online_memory(7, rest=0.01)}, 20_000.0),
        ({"1h": online_memory(7, rest=0.011)}, 80_000.0),
    ],
)
def test_the_peak_of_online_memory_is_that_of_the_worse_window(told: object, peak_mib: float) -> None:
    """A node of a former release tells nothing: then nobody is refused for it."""
    given = harvest_node()
    if told is not None:
        given["status"]["gpus"][2]["onlineMemory"] = told

    peaks = node_report(given).online_peak

    assert peaks.tolist() == [0.0, 0.0, peak_mib, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("told", [[1.0] * 31, [-1.0] + [1.0] * 31, [float("nan")] * 32, ["x"] * 32, 3])
def test_a_report_whose_online_memory_is_impossible_is_refused_as_a_whole(told: object) -> None:
    given = harvest_node()
    given["status"]["gpus"][0]["onlineMemory"] = {"1h": told}

    with pytest.raises(InvalidObject, match="GPUHarvestNode n1"):
        node_report(given)


def test_a_policy_can_let_jobs_in_beside_any_peak() -> None:
    given = harvest_node()
    given["status"]["gpus"][0]["onlineMemory"] = {"1h": online_memory(30)}
    given["spec"] = {"resolved": {"allowCrowded": True}}

    assert not node_report(given).online_peak.any()


def test_a_profile_is_of_use_once_it_is_ready() -> None:
    spec = {
        "workload": {"model": "llama", "gpuModel": "H100"},
        "standaloneTokensPerSecond": 900,
        "curve": [{"freeMiB": 40_000, "tokensPerSecond": 900}, {"freeMiB": 20_000, "tokensPerSecond": 500}],
        "fitMiB": 18_000,
    }

    ready = workload_profile({"spec": spec, "status": {"phase": "Ready"}})

    assert ready is not None
    assert (ready.curve.free_mib, ready.fit_mib, ready.gpu_model) == ((20_000, 40_000), 18_000, "H100")
    assert workload_profile({"spec": spec, "status": {"phase": "Profiling"}}) is None


def test_a_curve_that_falls_is_refused_with_the_name_of_the_profile() -> None:
    curve = [{"freeMiB": 1, "tokensPerSecond": 9}, {"freeMiB": 2, "tokensPerSecond": 1}]
    profile = {
        "metadata": {"name": "odd"},
        "spec": {"standaloneTokensPerSecond": 9, "curve": curve},
        "status": {"phase": "Ready"},
    }

    with pytest.raises(InvalidObject, match="OfflineProfile odd: curve must rise"):
        workload_profile(profile)


@pytest.mark.parametrize(
    ("windows", "counted"),
    [
        ({"10m": 0.9, "1h": 0.4, "24h": 0.1}, 0.55),
        ({"10m": 0.35, "1h": 0.4, "24h": 0.9}, 0.385),
        ({"10m": 0.1, "1h": 0.4, "24h": 0.9}, 0.15),
        ({"1h": 0.7, "24h": 0.3}, 0.7),
        ({"1h": 0.5}, 0.5),
        ({"24h": 0.4}, 0.4),
        ({"10m": 0.9, "24h": 0.4}, 0.55),
        ({"1m": 0.8, "10m": 0.6}, 0.6),
        ({}, 0.0),
    ],
)
def test_what_is_counted_on_is_of_the_windows_that_the_node_has_seen(windows: dict[str, float], counted: float) -> None:
    node = harvest_node("n1", cards=1)
    node["status"]["gpus"][0]["idle"] = windows

    assert node_report(node).idle[0] == pytest.approx(counted)


ABSURD = [
    "1" * 5_000,
    "0" * 5_000 + "1",
    "²",
    "1\n",
    " 1",
    "+1",
    "-1",
    "1.0",
    "nan",
    "1e999",
    "0x1",
    "x" * 200_000,
    "{}",
]


@pytest.mark.parametrize("text", ABSURD, ids=range(len(ABSURD)))
@pytest.mark.parametrize("key", [names.GPUS_REQUIRED, names.SLA, names.KIND, names.BASE, names.PROFILE, names.MODE])
def test_no_text_of_a_tenant_is_ever_more_than_refused_by_name(key: str, text: str) -> None:
    """A count of 5,000 digits was an error of Python's: no refusal, and a call of the webhook that failed."""
    one = pod(annotations={key: text})
    if key == names.GPUS_REQUIRED:
        one["spec"]["containers"][0]["resources"] = {}
    for read in (offline_pod, lambda it: mutate_offline(it, AdmissionSettings())):
        with contextlib.suppress(InvalidObject, PodRefused):
            read(one)
