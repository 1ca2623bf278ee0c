"""The real control plane for tests marked `cluster`: built once, started once for all of them."""

import signal
import urllib.request
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from cluster_helm import Helm
from valve_tools.cluster.controlplane import ControlPlane, NotBuilt, binaries, wait_for
from valve_tools.cluster.fleet import Heartbeat, create_nodes, delete_nodes, delete_pods, install_crds
from valve_tools.cluster.node import RealNode, missing

ROOT = Path(__file__).resolve().parents[2]


LAST_LINES = 12
MOST_COMPLAINTS = 30
MISSING = pytest.StashKey[str]()
UNQUIET = pytest.StashKey[list[str]]()
UNQUIET_EXIT = 66  # of a run in which Valve was not quiet: no second run of single tests makes that good


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Last of all: a control plane that runs beside them takes memory and time from tests that do not need it.

    Without the programs nothing here can run: one line says so, not one per test.
    """
    here = Path(__file__).parent
    items.sort(key=lambda item: here in item.path.parents)
    try:
        binaries(ROOT)
    except NotBuilt as reason:
        left_out = [item for item in items if here in item.path.parents]
        items[:] = [item for item in items if here not in item.path.parents]
        config.hook.pytest_deselected(items=left_out)
        config.stash[MISSING] = f"tests/cluster: {len(left_out)} tests not run, {reason}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if MISSING in config.stash:
        terminalreporter.write_line(config.stash[MISSING])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(UNQUIET, []):
        session.exitstatus = UNQUIET_EXIT


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What failed here was said by another process."""
    report = yield
    plane = getattr(item, "funcargs", {}).get("control_plane")
    if report.failed and plane is not None:
        for log in sorted(plane.folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            report.sections.append((f"the end of {log.name}", "\n".join(line[:300] for line in lines)))
    return report


@pytest.fixture(scope="session")
def ends_in_order() -> Iterator[None]:
    """A run that is told to end takes its processes and mounts down, as it does for Ctrl-C."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.fixture(scope="session")
def control_plane(
    ends_in_order: None, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[ControlPlane]:
    """API server, etcd and controller manager with Valve's CRDs; no scheduler, no nodes.

    At the end of all tests: no process of Valve ever died by itself or told of an error that no test expected.
    """
    plane = ControlPlane(tmp_path_factory.mktemp("cluster"), binaries(ROOT))
    try:
        plane.start()
        install_crds(plane.api, ROOT / "helm/valve")
        yield plane
    finally:
        plane.stop()
    if found := plane.complaints():
        pytestconfig.stash[UNQUIET] = found
        pytest.fail("\n".join(found[:MOST_COMPLAINTS]), pytrace=False)


@pytest.fixture(scope="module")
def nodes(control_plane: ControlPlane) -> Iterator[int]:
    """How many nodes of eight GPUs there are."""
    create_nodes(control_plane.api, 40)
    heartbeat = Heartbeat(control_plane.api, 40)
    heartbeat.start()
    yield 40
    heartbeat.stop()
    delete_nodes(control_plane.api)


@pytest.fixture(scope="module")
def scheduling(control_plane: ControlPlane, nodes: int) -> Iterator[ControlPlane]:
    """The extender and a stock kube-scheduler in front of it."""
    port, probes = control_plane.start_extender()
    wait_for("the extender", lambda: urllib.request.urlopen(f"http://127.0.0.1:{probes}/readyz"))
    control_plane.start_scheduler(port)
    yield control_plane
    control_plane.kill("kube-scheduler")
    control_plane.kill("extender")


@pytest.fixture(scope="module")
def node(control_plane: ControlPlane) -> Iterator[RealNode]:
    """A real kubelet and containerd with one emulated GPU; no valved yet."""
    problem = missing(control_plane.programs)
    if problem:
        pytest.skip(problem)
    with RealNode(control_plane) as real:
        yield real


@pytest.fixture(autouse=True)
def no_pods_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "control_plane" in request.fixturenames:
        delete_pods(request.getfixturevalue("control_plane").api)


@pytest.fixture(scope="session")
def helm(control_plane: ControlPlane) -> Helm:
    if not (control_plane.programs / "helm").exists():
        pytest.skip("no helm: build it once with `make cluster-tools` (Go 1.26, 7 minutes)")
    return Helm(control_plane)


@pytest.fixture(scope="module")
def chart(helm: Helm) -> Iterator[Helm]:
    """The chart, installed; its pods stay pending, their processes are started by the tests."""
    helm.install("--set=admission.enabled=false")
    try:
        yield helm
    finally:
        helm.uninstall()
