"""values.schema.json: the defaults pass, every documented value is known, and each wrong one is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from valved.cli.run import OFFLINE_TIMEOUTS

CHART = Path(__file__).resolve().parents[2] / "helm/valve"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def errors(values: Any) -> list[str]:
    found = jsonschema.Draft202012Validator(SCHEMA).iter_errors(values)
    return ["/".join(map(str, error.absolute_path)) for error in found]


def with_value(path: str, value: Any) -> Any:
    values = json.loads(json.dumps(DEFAULTS))
    *parents, last = path.split(".")
    target = values
    for part in parents:
        target = target[part]
    target[last] = value

    return values


def merged(values: Any, over: Any) -> Any:
    """As helm does it; a key whose value is null is gone."""
    if not isinstance(values, dict) or not isinstance(over, dict):
        return over
    whole = {
        key: merged(values[key], over[key]) if key in over and key in values else values.get(key) for key in values
    }
    return {key: value for key, value in {**over, **whole}.items() if value is not None}


def nothing_at(path: str) -> Any:
    """What `--set path=null` says."""
    head, _, rest = path.partition(".")
    return {head: nothing_at(rest) if rest else None}


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", sorted(CHART.glob("ci/*.yaml")), ids=lambda path: path.stem)
def test_the_values_of_the_goldens_pass(path: Path) -> None:
    assert errors(merged(DEFAULTS, yaml.safe_load(path.read_text()))) == []


def test_the_defaults_pass() -> None:
    assert errors(DEFAULTS) == []


def test_a_pod_of_the_chart_never_lacks_a_time_out_that_the_command_line_sets() -> None:
    """vLLM with several GPUs gave up after five minutes behind a gate: the chart had two names that vLLM dropped."""
    assert DEFAULTS["admission"]["offlineEnv"] == OFFLINE_TIMEOUTS


@pytest.mark.parametrize("opened", [{}, {"from": []}])
def test_a_picker_is_never_open_to_all_because_nobody_is_named(opened: dict[str, Any]) -> None:
    """Without a peer no NetworkPolicy was made, and any pod could hold the picker's places."""
    picker = {"name": "chat", "namespace": "serving", "service": "chat", "port": 8000}
    assert errors(with_value("pickers", [{**picker, **opened}])) == ["pickers/0" + ("/from" if opened else "")]
    assert errors(with_value("pickers", [{**picker, "from": [{"podSelector": {}}]}])) == []


# Free-form by nature: resource quantities, selectors and environments take any key.
FREE = ("resources", "nodeSelector", "namespaceLabel", "offlineEnv")


@pytest.mark.parametrize("path", [leaf for leaf in leaves(DEFAULTS) if not any(part in leaf for part in FREE)])
def test_a_misspelt_key_is_refused_everywhere(path: str) -> None:
    assert errors(with_value(f"{path}x", DEFAULTS)) != []


# Names nothing where it is left out, and the template knows that.
MAY_GO = ("global.imageRegistry", "imagePullSecrets", "pickers", "tag", "digest", "runtimeClass", "online.resources")


@pytest.mark.parametrize(
    "path", [leaf for leaf in leaves(DEFAULTS) if not any(part in leaf for part in (*FREE, *MAY_GO))]
)
def test_a_value_that_somebody_set_to_nothing_is_never_rendered_as_nothing(path: str) -> None:
    """`--set mode=null` gave the daemon the line `mode = `, and it did not start."""
    assert errors(merged(DEFAULTS, nothing_at(path))) != []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (
            "global",
            {"imageRegistry": "registry.example.com:5000/mirror", "storageClass": "of a chart around"},
        ),
        ("image.repository", "registry.example.com:5000/team/valve"),
        ("image.tag", "0.1.0-rc.1_build"),
        ("daemon.kubeletFolder", "/var/snap/k8s.d/kubelet"),
        ("daemon.resources.limits", {"cpu": 0.5, "memory": "1.5Gi", "nvidia.com/x": 1}),
    ],
)
def test_what_people_write_there_passes(path: str, value: Any) -> None:
    assert errors(with_value(path, value)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("domain", "valve"),
        ("domain", "Valve.gpu"),
        ("domain", "kubernetes.io"),
        ("domain", "gpu.k8s.io"),
        ("global", {"imageRegistri": "registry.example.com"}),
        ("global.imageRegistry", "https://registry.example.com"),
        ("image.repository", "foo:latest"),
        ("image.repository", "https://ghcr.io/valve"),
        ("image.tag", "bad tag!"),
        ("imagePullSecrets", [{"name": "a", "nam": "b"}]),
        ("daemon.resources.limits.memory", "lots"),
        ("daemon.resources.limits.memory", -1),
        ("daemon.tolerations", [{"key": "a", "operator": "Is"}]),
        ("daemon.tolerations", [{"kee": "a"}]),
        ("daemon.runFolder", "/../.."),
        ("daemon.runFolder", "/run/./valve"),
        ("daemon.nriSocket", "nri.sock"),
        ("scheduler.placement", {"nodeselector": {}}),
        ("admission.placement", {"affinity": {"podAntiaffinity": {}}}),
        ("mode", "on"),
        ("mode", True),
        ("image.tag", "latest"),
        ("image.digest", "sha256:short"),
        ("image.pullPolicy", "Sometimes"),
        ("daemon.metricsPort", 0),
        ("daemon.runFolder", "run/valve"),
        ("daemon.config", "[kube]\nharvest_unallocated = true\n"),
        ("daemon.config", "[breaker]\nrest_s = 9\n[ kube ]\nreport_s = 9\n"),
        ("daemon.config", 'mode = "off"'),
        ("daemon.reportSeconds", 90),
        ("scheduler.replicas", 0),
        ("scheduler.alignmentThreshold", 1.1),
        ("scheduler.kubeScheduler.tag", "latest"),
        ("controller.sla.windowSeconds", 5),
        ("admission.backend", "magic"),
        ("admission.certificates.source", "letsencrypt"),
        ("admission.certificates", {"source": "certManager", "issuer": {}}),
        ("admission.certificates.issuer", {"name": "", "kind": "Issuer"}),
        ("admission.offlineEnv", {"1BAD": "x"}),
        ("admission.offlineEnv", {"NVIDIA_VISIBLE_DEVICES": "all"}),
        ("admission.offlineEnv", {"LD_PRELOAD": "/a.so"}),
        ("admission.offlineEnv", {"GOOD": 1}),
        ("priorityClass.value", -10),
        ("drainHook.timeoutSeconds", 1),
        ("crds.install", "yes"),
    ],
)
def test_a_wrong_value_is_refused_where_it_stands(path: str, value: Any) -> None:
    assert any(found.startswith(path.replace(".", "/")) for found in errors(with_value(path, value)))
