"""`valve cluster report` on a real Prometheus that scrapes a real daemon on a real node.

A test has no week: the hours before it are made from what the daemon itself exports, name by name and label by label,
and written into the Prometheus that then goes on with the daemon's own figures.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from node_pods import OnlinePod
from valve_kube import names
from valve_tools.cluster.controlplane import free_port, wait_for
from valve_tools.cluster.node import NAME, RealNode

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not shutil.which("promtool"), reason="no prometheus: apt-get install prometheus"),
]

VALVE = Path(sys.executable).parent / "valve"
STEP_S, PAST_H = 300, 26
A_SECOND = {
    "valve_gpu_observed_seconds_total": 1.0,
    "valve_gpu_idle_seconds_total": 0.5,
    "valve_online_busy_seconds_total": 0.5,
    "valve_online_idles_total": 0.1,
}
"""How fast each counter rose in the hours before."""
AS_NOW = ("valve_gpu_offered_memory_bytes", "valve_gpu_memory_bytes")


@pytest.fixture(scope="module")
def serving(node: RealNode) -> Iterator[RealNode]:
    """valved as the chart starts it, and an online pod that has let go of its GPU once."""
    node.start_valved(mode="observe")
    pod = OnlinePod(node, "chat", annotations={names.ROLE: names.ONLINE})
    pod.wait_ready()
    pod.launch()
    wait_for("the daemon's figures of the pod and of the card's memory", lambda: are_told(series_of(exported(node))))
    yield node
    pod.close()


def are_told(series: dict[str, float]) -> bool:
    """What is offered is 0 until valved has looked at the card with the pod on it."""
    offered = [value for name, value in series.items() if name.startswith("valve_gpu_offered_memory_bytes")]
    return any(name.startswith('valve_online_idles_total{namespace="default"') for name in series) and all(offered)


def exported(node: RealNode) -> str:
    return str(urllib.request.urlopen(f"http://127.0.0.1:{node.metrics}/metrics").read().decode())


def series_of(text: str) -> dict[str, float]:
    """Name and labels of what the report may ask for, with their values now."""
    rows = re.findall(r"^(valve_\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
    return {series: float(value) for series, value in rows if series.partition("{")[0] in (*A_SECOND, *AS_NOW)}


def history(series: dict[str, float], end_s: int) -> str:
    """In OpenMetrics, all samples of a family together."""
    lines = []
    for name in sorted({one.partition("{")[0] for one in series}):
        kind = "counter" if name in A_SECOND else "gauge"
        lines.append(f"# TYPE {name.removesuffix('_total')} {kind}")
        for one, value in series.items():
            if one.partition("{")[0] != name:
                continue
            labelled = one.replace("{", f'{{node="{NAME}",', 1)
            for at_s in range(end_s - PAST_H * 3600, end_s, STEP_S):
                shown = A_SECOND[name] * (at_s - end_s + PAST_H * 3600) if name in A_SECOND else value
                lines.append(f"{labelled} {shown} {at_s}")
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture
def prometheus(serving: RealNode, tmp_path: Path) -> Iterator[str]:
    """Its URL: the hours before, and the daemon's own figures each second from now on."""
    past, data, port = tmp_path / "past.om", tmp_path / "data", free_port()
    past.write_text(history(series_of(exported(serving)), int(time.time()) - 600))
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(past), str(data)], check=True, capture_output=True
    )
    static = [{"targets": [f"127.0.0.1:{serving.metrics}"], "labels": {"node": NAME}}]
    scrape = {"job_name": "valve", "scrape_interval": "1s", "scrape_timeout": "1s", "static_configs": static}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    flags = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={data}"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def asked(url: str, query: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/api/v1/query?query={query}") as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def test_the_page_is_of_what_a_daemon_exports_and_prometheus_keeps(
    serving: RealNode, prometheus: str, tmp_path: Path
) -> None:
    def scraped() -> bool:
        rows = asked(prometheus, "valve_gpu_observed_seconds_total")
        return [row["metric"]["node"] for row in rows] == [NAME] and bool(asked(prometheus, "up==1"))

    wait_for("a scrape of the daemon", scraped)
    wait_for("its report", lambda: serving.report().get("gpus"))
    out = tmp_path / "page.html"
    flags = [f"--prometheus={prometheus}", "--since=1d", "--sla=0.2,0.6", f"--out={out}", "--json"]
    access = f"--kubeconfig={serving.plane.kubeconfig}"

    done = subprocess.run(
        [str(VALVE), "cluster", "report", *flags, access], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (pool,) = found["pools"]
    assert (pool["nodes"], pool["gpus"]) == (1, 1)
    assert pool["idle"] == pytest.approx(0.5, abs=0.02)
    assert pool["hours"] >= 20
    low, high = pool["levels"]
    assert 0 < low["gpus_saved"] <= 0.52
    assert low["kept_share"] == 1.0
    assert (high["gpus_saved"], high["kept_share"]) == (0.0, None)
    (paid,) = found["prices"]
    assert (paid["namespace"], paid["pod"]) == ("default", "chat")
    assert paid["preemptions"] == pytest.approx(0.1 * 86400, rel=0.1)
    assert "default/chat" in out.read_text()
    assert "1 GPUs on 1 nodes would have saved" in out.read_text()
