"""The chart as it renders.

Valid for every supported Kubernetes, least rights, and nothing that can stop an online pod.
"""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from goldens import dashboard, golden
from prometheus_client import generate_latest
from valve_scheduler import metrics
from valve_scheduler.extender.pair import PAIR_PATH

from valved.config import KubeTable, load_config

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
FILES = ("default", "airgapped", "certmanager")
# Oldest, newest and one between them; each object costs a tenth of a second.
RENDERED = [
    ("default", "1.30"),
    ("default", "1.33"),
    ("default", "1.36"),
    ("airgapped", "1.30"),
    ("certmanager", "1.33"),
    ("policy", "1.36"),
    ("pickers", "1.36"),
]
# Kinds of other projects, whose schemas the validator does not carry.
FOREIGN = ("monitoring.coreos.com/v1", "cert-manager.io/v1", "inference.networking.k8s.io/v1")


@functools.cache
def objects(name: str) -> list[Json]:
    text = golden(name)
    return [found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found]


def of_kind(kind: str, name: str = "default") -> list[Json]:
    return [found for found in objects(name) if found["kind"] == kind]


def pod_specs(name: str = "default") -> Iterator[tuple[str, Json]]:
    for found in objects(name):
        if found["kind"] == "Pod":
            yield found["metadata"]["name"], found["spec"]
        elif "template" in found.get("spec", {}):
            yield found["metadata"]["name"], found["spec"]["template"]["spec"]


@functools.cache  # four of nine objects are the same as in another rendering
def assert_valid(written: str, version: str) -> None:
    kubernetes_validate.validate(json.loads(written), version, strict=True)


@pytest.mark.parametrize(("name", "version"), RENDERED)
def test_every_object_is_valid_to_the_letter(name: str, version: str) -> None:
    for found in objects(name):
        if found["apiVersion"] not in FOREIGN:
            assert_valid(json.dumps(found), version)


@pytest.mark.cluster
def test_the_goldens_are_what_helm_renders_now(tmp_path: Path) -> None:
    script = ROOT / "tests/cluster/build_tools.sh"
    programs = subprocess.run([str(script), "--where"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(programs, "helm").exists():
        pytest.skip("no helm: build it once with `make cluster-tools` (Go 1.26, 7 minutes)")

    subprocess.run([str(ROOT / "tests/helm/render.sh"), str(tmp_path)], check=True)

    for name in (*FILES, "policy", "pickers"):
        assert golden(name) == (tmp_path / f"{name}.yaml").read_text(), (
            f"run tests/helm/render.sh and review the change of {name}.yaml"
        )


@pytest.mark.cluster
@pytest.mark.parametrize("name", FILES)
def test_helm_has_nothing_to_say_against_the_chart(name: str) -> None:
    script = ROOT / "tests/cluster/build_tools.sh"
    programs = subprocess.run([str(script), "--where"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(programs, "helm").exists():
        pytest.skip("no helm: build it once with `make cluster-tools` (Go 1.26, 7 minutes)")

    values = f"--values={ROOT}/helm/valve/ci/{name}-values.yaml"
    done = subprocess.run(
        [f"{programs}/helm", "lint", "--strict", str(ROOT / "helm/valve"), values],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, "0 chart(s) failed" in done.stdout) == (0, True), done.stdout


# Per alert: series that must set it off, and after how long.
FIRING = {
    "ValveGateFailures": ({"valve_gate_failures_total{node='n'}": "0+1x180"}, "1h"),
    "ValvePreemptionSlow": (
        {
            "valve_preemption_latency_seconds_bucket{node='n',le='0.001'}": "0+90x180",
            "valve_preemption_latency_seconds_bucket{node='n',le='0.01'}": "0+100x180",
            "valve_preemption_latency_seconds_bucket{node='n',le='+Inf'}": "0+100x180",
        },
        "1h",
    ),
    "ValveGateWaitsForCore": (
        {
            "valve_gate_core_wait_seconds_total{node='n'}": "0+3x180",
            "valve_gate_core_runs_total{node='n'}": "0+5000x180",
        },
        "1h",
    ),
    "ValveOnlineDelayed": (
        {
            "valve_service_delay_seconds_total{node='n',name='chat',service='1'}": "0+2x180",
            "valve_service_busy_seconds_total{node='n',name='chat',service='1'}": "0+60x180",
        },
        "1h",
    ),
    "ValveOnlineUninjected": ({"valve_online_uninjected{node='n'}": "2x180"}, "2h"),
    "ValveDaemonDown": ({"up{container='valved',node='n'}": "0x180"}, "1h"),
    "ValveReportStale": ({"valve_extender_oldest_report_seconds": "91x180"}, "1h"),
    "ValveClockSkew": ({"valve_extender_clock_skew_seconds": "90x180"}, "1h"),
    "ValveNoExtender": ({"valve_extender_ready": "0x180"}, "1h"),
    # The first failure begins the series, and another pod had many before it was replaced.
    "ValveRoundsFail": (
        {
            "valve_failed_rounds_total{round='clear',pod='former'}": "100x48 stale",
            "valve_failed_rounds_total{round='clear',pod='p'}": "_x50 1+1x20",
        },
        "1h",
    ),
    "ValveObjectsUnreadable": (
        {
            "valve_invalid_objects_total{kind='Pod',pod='former'}": "100x48 stale",
            "valve_invalid_objects_total{kind='Pod',pod='p'}": "_x55 1x20",
        },
        "1h",
    ),
    "ValveSLAMissed": ({"valve_monitor_violating_pods": "1x180"}, "2h"),
    "ValveBreakerOpen": ({"valve_breakers_open{node='n'}": "1x180"}, "1h"),
    "ValveOfflineUngated": ({"valve_offline_ungated_seconds_total{node='n'}": "4x60 9x120"}, "1h5m"),
    "ValveOfflineStays": ({"valve_offline_leaving_seconds{node='n'}": "0+60x180"}, "1h"),
    "ValveCertificateEnds": ({"valve_webhook_certificate_expiry_timestamp_seconds": "86400x180"}, "1h"),
}
# What a sound fleet shows, hour after hour.
SOUND = {
    "valve_gate_failures_total{node='n'}": "3x180",
    "valve_preemption_latency_seconds_bucket{node='n',le='0.001'}": "0+100x180",
    "valve_preemption_latency_seconds_bucket{node='n',le='+Inf'}": "0+100x180",
    "valve_gate_core_wait_seconds_total{node='n'}": "0+0.3x180",
    "valve_gate_core_runs_total{node='n'}": "0+5000x180",
    "valve_service_delay_seconds_total{node='n',name='chat',service='1'}": "0+0.3x180",
    "valve_service_busy_seconds_total{node='n',name='chat',service='1'}": "0+60x180",
    # Busy for 0.2 s now and then, delayed by 0.2 % of that: what is worth harvesting most.
    "valve_service_delay_seconds_total{node='n',name='rare',service='2'}": "0+0.0024x180",
    "valve_service_busy_seconds_total{node='n',name='rare',service='2'}": "0+1.2x180",
    "valve_service_busy{node='n',name='rare',service='2'}": "0x180",
    "valve_extender_clock_skew_seconds": "2x180",
    "valve_online_uninjected{node='n'}": "0x180",
    "valve_breakers_open{node='n'}": "0x180",
    "valve_offline_ungated_seconds_total{node='n'}": "4x180",
    "valve_offline_leaving_seconds{node='n'}": "0x180",
    "up{container='valved',node='n'}": "1x180",
    "valve_extender_oldest_report_seconds": "40x180",
    "valve_extender_ready": "1x180",
    "valve_monitor_violating_pods": "0x180",
    # One went wrong long ago, and one round failed just now.
    "valve_failed_rounds_total{round='account',pod='p'}": "3x110 4x70",
    "valve_invalid_objects_total{kind='OfflineProfile',pod='p'}": "7x180",
    "valve_webhook_certificate_expiry_timestamp_seconds": "31536000x180",
}


needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool: apt-get install prometheus")


def judge(tmp_path: Path, scenes: Iterable[tuple[dict[str, str], list[str], str]]) -> None:
    """Each scene: series beside those of a sound fleet, when to look, and the one alert that fires then, or none."""
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in {**SOUND, **series}.items()],
            "promql_expr_test": [
                {
                    "expr": "count by (alertname) (ALERTS{alertstate='firing'})",
                    "eval_time": at,
                    "exp_samples": [{"labels": f"{{alertname='{alert}'}}", "value": 1}] if alert else [],
                }
                for at in moments
            ],
        }
        for series, moments, alert in scenes
    ]
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ROOT / "helm/valve/files/rules.yaml")], "tests": tests}))

    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else(tmp_path: Path) -> None:
    rules = yaml.safe_load((ROOT / "helm/valve/files/rules.yaml").read_text())["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == set(FIRING)

    judge(tmp_path, [({}, ["2h"], ""), *((series, [at], alert) for alert, (series, at) in FIRING.items())])


COUNTERS = {
    "ValveGateFailures": "valve_gate_failures_total{node='n'}",
    "ValveOfflineUngated": "valve_offline_ungated_seconds_total{node='n'}",
    "ValveRoundsFail": "valve_failed_rounds_total{round='clear',pod='p'}",
    "ValveObjectsUnreadable": "valve_invalid_objects_total{kind='Pod',pod='p'}",
}


@needs_promtool
@pytest.mark.parametrize("minutes", [15, 20, 100])
def test_an_old_count_never_fires_after_a_hole_in_the_scraping(tmp_path: Path, minutes: int) -> None:
    hole = dict.fromkeys(COUNTERS.values(), f"40x30 _x{minutes} 40x60")
    moments = [f"{minute}m" for minute in range(31 + minutes, 66 + minutes)]

    judge(tmp_path, [(hole, moments, "")])


@needs_promtool
def test_what_a_process_counts_is_never_hidden_by_the_one_before_it_in_the_same_pod(tmp_path: Path) -> None:
    moments = ["41m", "45m", "53m"]

    judge(
        tmp_path,
        [
            ({COUNTERS[alert]: "40x30 stale _x8 3x60"}, moments, alert)
            for alert in ("ValveRoundsFail", "ValveObjectsUnreadable")
        ],
    )


@pytest.mark.parametrize("name", FILES)
def test_no_role_has_a_wildcard_or_reads_secrets_of_others(name: str) -> None:
    for role in [*of_kind("ClusterRole", name), *of_kind("Role", name)]:
        for rule in role["rules"]:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]], role["metadata"]["name"]
            if "secrets" in rule["resources"]:
                assert role["kind"] == "Role"
                assert rule["verbs"] == ["create"] or rule["resourceNames"] == ["valve-webhook-tls"]


def test_the_daemon_has_no_right_on_nodes_and_cannot_touch_pods() -> None:
    (role,) = (role for role in of_kind("ClusterRole") if role["metadata"]["name"] == "valve-daemon")

    granted = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}

    assert not any(resource.startswith("nodes") for resource, _ in granted)
    assert {verb for resource, verb in granted if resource.startswith("pods")} == {"get", "list", "watch"}


@pytest.mark.parametrize("name", FILES)
def test_go_s_memory_limit_is_never_above_the_container_s(name: str) -> None:
    (spec,) = (spec for owner, spec in pod_specs(name) if owner == "valve-scheduler")
    scheduler = spec["containers"][0]

    (limit,) = (one["value"] for one in scheduler["env"] if one["name"] == "GOMEMLIMIT")
    assert (limit, scheduler["resources"]["limits"]["memory"]) == ("921MiB", "1Gi")


@pytest.mark.parametrize("name", FILES)
def test_nothing_that_answers_the_scheduler_waits_for_processor_time(name: str) -> None:
    for owner, spec in pod_specs(name):
        if owner == "valve-scheduler":
            assert all("cpu" not in container["resources"]["limits"] for container in spec["containers"])


@pytest.mark.parametrize("name", FILES)
def test_no_kube_scheduler_keeps_its_lease_without_its_extender(name: str) -> None:
    (spec,) = (spec for owner, spec in pod_specs(name) if owner == "valve-scheduler")
    scheduler, extender = spec["containers"]

    probe = scheduler["livenessProbe"]
    (metrics,) = (port["containerPort"] for port in extender["ports"] if port["name"] == "metrics")
    assert probe["httpGet"] == {"path": PAIR_PATH, "port": metrics}
    assert probe["periodSeconds"] * probe["failureThreshold"] <= 20


@pytest.mark.parametrize("name", FILES)
def test_only_the_daemon_is_privileged_and_on_the_host(name: str) -> None:
    for owner, spec in pod_specs(name):
        if owner == "valve-daemon":
            assert not spec.get("hostNetwork")  # it would block the surge of an update
            continue
        assert spec["securityContext"]["runAsNonRoot"]
        assert not any(spec.get(key) for key in ("hostPID", "hostNetwork", "hostIPC"))
        assert not any("hostPath" in volume for volume in spec.get("volumes", []))
        for container in spec["containers"]:
            context = container["securityContext"]
            assert not context["allowPrivilegeEscalation"]
            assert context["readOnlyRootFilesystem"]
            assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", FILES)
def test_every_container_has_its_share_and_a_pinned_image(name: str) -> None:
    for _, spec in pod_specs(name):
        for container in spec["containers"]:
            assert container["resources"]["requests"]["memory"]
            assert container["resources"]["limits"]["memory"]
            assert re.search(r"(:v?\d|@sha256:)", container["image"])
            assert not container["image"].endswith(":latest")


def test_every_component_runs_where_its_values_say() -> None:
    told = {}
    for owner, spec in pod_specs("certmanager"):
        tolerated = [one["key"] for one in spec.get("tolerations", [])]
        told[owner] = (spec.get("nodeSelector"), tolerated, spec.get("priorityClassName"))

    daemon = told.pop("valve-daemon")
    assert set(told) == {"valve-scheduler", "valve-controller", "valve-webhook", "valve-drain", "valve-test"}
    assert all(one == ({"pool": "system"}, ["system"], "ours") for one in told.values())
    assert daemon[1:] == (["nvidia.com/gpu"], "ours")


def test_one_replica_of_each_stays_while_nodes_are_drained() -> None:
    replicated = {found["metadata"]["name"] for found in of_kind("Deployment")}

    assert {found["metadata"]["name"] for found in of_kind("PodDisruptionBudget")} == replicated
    assert len(replicated) == 3
    (only,) = of_kind("PodDisruptionBudget", "airgapped")  # where scheduler and webhook have one replica
    assert only["metadata"]["name"] == "valve-controller"


def test_the_network_policy_leaves_open_what_is_asked_from_outside() -> None:
    (policy,) = of_kind("NetworkPolicy", "certmanager")
    opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    containers = [one for _, spec in pod_specs("certmanager") for one in spec["containers"]]

    assert opened == {port["name"] for one in containers for port in one.get("ports", [])}
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    for workload in [*of_kind("Deployment"), *of_kind("DaemonSet")]:
        assert selected <= workload["spec"]["template"]["metadata"]["labels"].items()
    assert of_kind("NetworkPolicy") == []


def test_a_picker_is_never_wider_open_than_its_pool_needs() -> None:
    names = {"valve-picker-chat", "valve-picker-code"}
    of_pickers = [one for one in objects("pickers") if one["metadata"]["name"] in names]
    assert {one["metadata"]["namespace"] for one in of_pickers} == {"serving"}
    assert not [one for one in of_pickers if one["kind"].startswith("Cluster")]
    for role in (one for one in of_pickers if one["kind"] == "Role"):
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        ]
    policies = [one for one in of_pickers if one["kind"] == "NetworkPolicy"]
    assert {one["metadata"]["name"] for one in policies} == names
    for policy in policies:
        guarded, probed = policy["spec"]["ingress"]
        assert guarded["from"]
        assert [one["port"] for one in guarded["ports"]] == ["grpc"]
        assert [one["port"] for one in probed["ports"]] == ["health"]
    (pool,) = of_kind("InferencePool", "pickers")
    assert pool["spec"]["endpointPickerRef"] == {
        "name": "valve-picker-chat",
        "port": {"number": 9002},
        "failureMode": "FailOpen",
    }
    assert not [one for one in objects("default") if "picker" in one["metadata"]["name"]]


def test_a_mirror_is_in_front_of_every_image() -> None:
    images = {container["image"] for _, spec in pod_specs("airgapped") for container in spec["containers"]}

    assert len(images) == 2
    assert all(image.startswith("registry.example.com/mirror/") for image in images)


@pytest.mark.parametrize("name", FILES)
def test_nothing_of_the_webhook_can_stop_an_online_pod(name: str) -> None:
    (configuration,) = of_kind("MutatingWebhookConfiguration", name)
    offline, job, online = configuration["webhooks"]

    assert (job["failurePolicy"], job["rules"][0]["resources"]) == ("Ignore", ["jobs"])
    assert (online["failurePolicy"], online["timeoutSeconds"]) == ("Ignore", 2)
    assert online["namespaceSelector"]["matchLabels"]
    assert any("nvidia.com/gpu" in condition["expression"] for condition in online["matchConditions"])
    assert offline["failurePolicy"] == "Fail"
    (condition,) = offline["matchConditions"]
    assert condition["expression"].count("== 'offline'") == 2  # as a label or as an annotation, and nothing else
    for hook in (offline, online):
        assert hook["rules"] == [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": ["pods"],
                "operations": ["CREATE"],
                "scope": "Namespaced",
            }
        ]
        excluded = hook["namespaceSelector"]["matchExpressions"][0]["values"]
        assert excluded == ["kube-system", "valve-system"]


def test_with_the_policy_engine_no_server_stands_before_an_online_pod() -> None:
    (configuration,) = of_kind("MutatingWebhookConfiguration", "policy")
    (policy,) = of_kind("MutatingAdmissionPolicy", "policy")

    assert [hook["name"] for hook in configuration["webhooks"]] == ["offline.valve.gpu", "job.valve.gpu"]
    assert policy["spec"]["failurePolicy"] == "Ignore"
    assert policy["spec"]["matchConstraints"]["namespaceSelector"]["matchLabels"] == {"valve.gpu/inject": "enabled"}


def test_no_node_is_bought_for_offline_work() -> None:
    classes = list(of_kind("PriorityClass"))

    assert [one["metadata"]["name"] for one in sorted(classes, key=lambda one: one["value"])] == [
        "valve-offline-low",
        "valve-offline",
        "valve-offline-high",
    ]
    for priority in classes:
        assert priority["value"] < -10
        assert priority["preemptionPolicy"] == "Never"
        assert not priority["globalDefault"]


def test_the_scheduler_is_configured_as_the_extender_expects() -> None:
    (configuration,) = (c for c in of_kind("ConfigMap") if c["metadata"]["name"] == "valve-scheduler")

    found = yaml.safe_load(configuration["data"]["config.yaml"])

    (extender,) = found["extenders"]
    assert (extender["nodeCacheCapable"], extender["ignorable"]) == (True, False)
    assert extender["managedResources"] == [{"name": "valve.gpu/harvested-gpu", "ignoredByScheduler": False}]
    assert found["percentageOfNodesToScore"] == 100
    assert found["profiles"] == [{"schedulerName": "valve-scheduler"}]


def test_whoever_judges_gpu_sets_judges_by_the_same_threshold() -> None:
    told = {
        flag
        for deployment in of_kind("Deployment")
        for container in deployment["spec"]["template"]["spec"]["containers"]
        for flag in container["command"]
        if flag.startswith("--alignment-threshold")
    }
    judges = [d["metadata"]["name"] for d in of_kind("Deployment") if "alignment-threshold" in str(d)]

    assert (told, judges) == ({"--alignment-threshold=0.8"}, ["valve-controller", "valve-scheduler"])


def test_nvml_comes_into_the_daemon_s_container_with_the_driver() -> None:
    """Without it no card has memory or processes, and every GPU is left out."""
    (spec,) = (spec for owner, spec in pod_specs("default") if owner == "valve-daemon")

    variables = {entry["name"]: entry.get("value") for entry in spec["containers"][0]["env"]}
    assert spec["runtimeClassName"] == "nvidia"
    assert (variables["NVIDIA_VISIBLE_DEVICES"], variables["NVIDIA_DRIVER_CAPABILITIES"]) == ("all", "utility")


@pytest.mark.parametrize("name", [*FILES, "policy"])
def test_the_daemon_accepts_the_file_that_the_chart_writes(name: str, tmp_path: Path) -> None:
    (written,) = (c["data"] for c in of_kind("ConfigMap", name) if c["metadata"]["name"] == "valve-daemon")
    path = tmp_path / "valved.toml"
    path.write_text(written["valved.toml"])

    kube = load_config(path, {}).kube

    expected = (True, 15.0) if name == "certmanager" else (False, 30.0)
    assert (kube.harvest_unallocated, kube.report_s) == expected


@pytest.mark.parametrize("name", FILES)
def test_the_daemon_sees_every_folder_in_which_the_toolkit_may_describe_the_gpus(name: str) -> None:
    """With the backend cdi an offline container cannot start without that description."""
    (spec,) = (spec for owner, spec in pod_specs(name) if owner == "valve-daemon")
    volumes = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in spec["volumes"]}

    seen = {mount["mountPath"]: volumes[mount["name"]] for mount in spec["containers"][0]["volumeMounts"]}

    assert {folder: seen.get(folder) for folder in KubeTable().toolkit_folders} == {
        folder: folder for folder in KubeTable().toolkit_folders
    }


def test_an_update_of_the_daemon_never_leaves_a_node_without_one() -> None:
    (daemon,) = of_kind("DaemonSet")

    assert daemon["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_crds_survive_an_uninstall() -> None:
    crds = of_kind("CustomResourceDefinition")

    assert len(crds) == 5
    assert all(crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for crd in crds)


def test_another_domain_reaches_every_name() -> None:
    text = golden("certmanager")

    left = [line for line in text.splitlines() if "valve.gpu" in line]

    assert left == []
    assert "harvest.example.com/harvested-gpu" in text


def known_metrics() -> set[str]:
    """Families of the scheduler from its registry, of the daemon from the names in its metrics file."""
    page = generate_latest(metrics.REGISTRY).decode()
    own = set(re.findall(r"^# TYPE (\S+) ", page, re.M))
    files = (ROOT / "valved/metrics.py", ROOT / "valved/kube/figures.py")
    daemon = {name for file in files for name in re.findall(r'"(valve_[a-z_]+)"', file.read_text())}

    return {f"{name}{suffix}" for name in own | daemon for suffix in ("", "_total", "_bucket", "_sum", "_count")}


def queries() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for group in yaml.safe_load((ROOT / "helm/valve/files/rules.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def test_panels_of_a_row_of_the_dashboard_stand_side_by_side() -> None:
    panels = dashboard()["panels"]
    rows: dict[int, list[Json]] = {}
    for panel in panels:
        rows.setdefault(panel["gridPos"]["y"], []).append(panel["gridPos"])

    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert sorted(rows) == [8 * row for row in range(len(rows))]
    for row in rows.values():
        ends = [place["x"] + place["w"] for place in row]
        assert [place["x"] for place in row] == [0, *ends[:-1]]
        assert ends[-1] == 24


def test_every_query_is_about_metrics_that_exist() -> None:
    asked = {name for query in queries() for name in re.findall(r"valve_[a-z_]+", query)}

    assert asked
    assert asked <= known_metrics()


def test_an_alert_pages_only_for_harm_to_online_work() -> None:
    groups = yaml.safe_load((ROOT / "helm/valve/files/rules.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    critical = {rule["alert"] for rule in rules if rule["labels"]["severity"] == "critical"}

    assert critical == {"ValveOnlineDelayed", "ValveOfflineUngated"}


def test_no_alert_leaves_out_what_to_do() -> None:
    groups = yaml.safe_load((ROOT / "helm/valve/files/rules.yaml").read_text())["groups"]
    told = {rule["alert"]: rule["annotations"]["description"] for group in groups for rule in group["rules"]}
    step = re.compile(r"(^|\. |, )(Run|Read|Restart|Find|Set|Look|Start|Change) |`kubectl [^`]+` says")

    assert told
    assert [alert for alert, text in told.items() if not step.search(text)] == []


def test_no_volume_hides_what_an_image_of_valve_may_hold() -> None:
    """An image laid out under a clone's own path in /tmp was hidden by a volume there: its webhook never started."""
    own = {"/etc/valve", "/etc/cdi", "/scratch", "/run/valve", "/var/lib/valve", "/var/run/cdi"}
    for one in filter(None, yaml.safe_load_all(golden("default"))):
        for container in one.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            if "kube-scheduler" not in container["image"]:
                mounted = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
                assert all(path in own or path.startswith("/var/lib/kubelet/") for path in mounted), mounted
