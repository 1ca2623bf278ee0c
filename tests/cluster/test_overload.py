"""An API server that refuses with 429, and one that answers 500: every client of ours backs off, and nothing is lost.

Both are the server's own: priority and fairness rejects whoever has no seats (with Retry-After), and an admission
webhook that nobody serves makes every write of ours an internal error.
"""

import asyncio
import contextlib
import http.client
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_pods import held_gpus, submit, wait_bound
from valve_kube import names
from valve_kube.access import from_kubeconfig
from valve_kube.client import KubeClient
from valve_tools.cluster.api import ApiRefused, ClusterApi
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import bound_pods, node_name

from valved.kube.apiserver import ApiServer, now_text
from valved.kube.pods import PodBook

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

Json = dict[str, Any]
FAIRNESS = "/apis/flowcontrol.apiserver.k8s.io/v1"
SCHEMAS, LEVELS = f"{FAIRNESS}/flowschemas", f"{FAIRNESS}/prioritylevelconfigurations"
ACCOUNTS = "/api/v1/namespaces/default/serviceaccounts"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
HOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
POLICIES = f"{names.API_PATH}/harvestpolicies"
BOTH = ("extender", "controller")
USER = "system:serviceaccount:default:ours"
JAIL = "nobody-gets-in"
NODE = node_name(7)


class Daemon(threading.Thread):
    """What a node's daemon does at the API server, in its own words: three watches, and a report again and again."""

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(daemon=True)
        self._kubeconfig = kubeconfig
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self.heard: list[Json] = []
        self.written = self.failed = 0

    def run(self) -> None:
        self._loop.run_until_complete(self._run())

    async def _run(self) -> None:
        client = KubeClient(from_kubeconfig(str(self._kubeconfig)))

        def found(item: Json) -> None:
            self.heard.append(item.get("spec") or {})

        api = ApiServer(client, NODE, PodBook(), lambda _: None, found=found)
        watching = asyncio.ensure_future(api.run())
        epoch = 1000
        while not self._ending.is_set():
            epoch += 1
            await api.write({"phase": "Harvesting", "epoch": epoch, "observedAt": now_text()})
            self.written, self.failed = api.written, api.failed
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), 1.0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        api.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self.join()


@pytest.fixture(scope="module")
def ours(control_plane: ControlPlane, nodes: int) -> Iterator[Daemon]:
    """Extender, controller and a node's daemon under an account of their own: the administrator is never refused."""
    api, plane = control_plane.api, control_plane
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    subjects = [{"kind": "ServiceAccount", "name": name, "namespace": "default"} for name in ("ours", "crowd")]
    for name in ("ours", "crowd"):
        api.post(ACCOUNTS, {"metadata": {"name": name}})
    api.post(BINDINGS, {"metadata": {"name": "ours"}, "roleRef": role, "subjects": subjects})
    access = plane.account_kubeconfig("default", "ours")
    port, probes = plane.start_extender(kubeconfig=access)
    wait_for("the extender", lambda: urllib.request.urlopen(f"http://127.0.0.1:{probes}/readyz"))
    plane.start_scheduler(port)
    plane.start_controller("--namespace=default", "--monitor-every=1", kubeconfig=access)
    daemon = Daemon(access)
    daemon.start()
    wait_for("the controller", lambda: "leads" in plane.log("controller"))
    yield daemon
    daemon.stop()
    for name in ("controller", "kube-scheduler", "extender"):
        plane.kill(name)
    for path in (f"{BINDINGS}/ours", f"{ACCOUNTS}/ours", f"{ACCOUNTS}/crowd"):
        api.delete(path)


class Crowd(threading.Thread):
    """Keeps the one seat there is: a list of what is yet to come waits three seconds in the API server."""

    def __init__(self, port: int, token: str) -> None:
        super().__init__(daemon=True)
        self._api = ClusterApi(port, token)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.01):
            with contextlib.suppress(ApiRefused, OSError, http.client.HTTPException):
                self._api.get("/api/v1/nodes?resourceVersion=999999999&resourceVersionMatch=NotOlderThan")

    def stop(self) -> None:
        self._over.set()
        self.join()


def schema(name: str, level: str, account: str) -> Json:
    everything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": True, "namespaces": ["*"]}
    subject = {"kind": "ServiceAccount", "serviceAccount": {"name": account, "namespace": "default"}}
    rules = [{"subjects": [subject], "resourceRules": [everything]}]
    spec = {"priorityLevelConfiguration": {"name": level}, "matchingPrecedence": 2, "rules": rules}
    return {"metadata": {"name": name}, "spec": spec}


@pytest.fixture
def jail(control_plane: ControlPlane, ours: Daemon) -> Iterator[Any]:
    """Two functions: to take every seat from our account, and to give them back; at the end at the latest."""
    api = control_plane.api
    # A level of no seats still lets one in at a time.
    limited = {"nominalConcurrencyShares": 0, "lendablePercent": 0, "borrowingLimitPercent": 0}
    limited["limitResponse"] = {"type": "Reject"}
    api.post(LEVELS, {"metadata": {"name": JAIL}, "spec": {"type": "Limited", "limited": limited}})
    token = api.post(f"{ACCOUNTS}/crowd/token", {"spec": {"expirationSeconds": 3600}})["status"]["token"]
    crowd = [Crowd(control_plane.port, token) for _ in range(3)]

    def begin() -> None:
        api.post(SCHEMAS, schema("the-crowd", JAIL, "crowd"))
        api.post(SCHEMAS, schema(JAIL, JAIL, "ours"))
        for one in crowd:
            one.start()

    def undo() -> None:
        for path in (f"{SCHEMAS}/{JAIL}", f"{SCHEMAS}/the-crowd", f"{LEVELS}/{JAIL}"):
            with contextlib.suppress(ApiRefused):
                api.delete(path)
        for one in crowd:
            if one.is_alive():
                one.stop()

    yield begin, undo
    undo()


def refused(plane: ControlPlane) -> int:
    """How many requests the server has turned away, by its own count."""
    text = str(plane.api.get("/metrics").get("message", ""))
    found = re.findall(rf'apiserver_flowcontrol_rejected_requests_total{{flow_schema="{JAIL}".*}} (\S+)', text)
    return int(sum(map(float, found)))


def logged(plane: ControlPlane, name: str, words: str) -> list[Json]:
    lines = [json.loads(line) for line in plane.log(name).splitlines() if line.startswith("{")]
    return [line for line in lines if words in line.get("error", "")]


@pytest.fixture
def order(control_plane: ControlPlane) -> Iterator[Callable[[], None]]:
    """Gives a policy; it is gone afterwards, however the test ends: an uninstall in another one waits for that."""
    policy = {"apiVersion": names.API_VERSION, "kind": "HarvestPolicy", "metadata": {"name": "meanwhile"}}
    yield lambda: control_plane.api.post(POLICIES, policy | {"spec": {"reclaimsPerHour": 7}})
    with contextlib.suppress(ApiRefused):
        control_plane.api.delete(f"{POLICIES}/meanwhile")


def test_clients_that_are_refused_with_429_back_off_and_go_on_where_they_were(
    control_plane: ControlPlane, ours: Daemon, jail: Any, order: Callable[[], None]
) -> None:
    plane, api = control_plane, control_plane.api
    submit(api, 10)
    wait_bound(api, 10)
    wait_for("reports", lambda: ours.written > 1)

    begin, undo = jail
    begin()
    wait_for("a refused report", lambda: ours.failed > 0)
    # Watches that stand are left alone by the server; they end with it. A client that is back before the crowd has
    # its watches again, and is not refused: then once more.
    for attempt in range(4):
        plane.kill("kube-apiserver")
        plane.restart("kube-apiserver")
        wait_for("the API server", lambda: api.get("/readyz"), 120)
        if not attempt:
            order()
            submit(api, 10)
        with contextlib.suppress(TimeoutError):
            wait_for("429s of both", lambda: all(len(logged(plane, name, "429 ")) > 3 for name in BOTH), 40)
            break
    assert all(len(logged(plane, name, "429 ")) > 3 for name in BOTH)
    begin_s, before, failed = time.monotonic(), refused(plane), ours.failed
    wait_for("more of them", lambda: ours.failed > failed + 5)
    rate = (refused(plane) - before) / (time.monotonic() - begin_s)

    undo()

    assert set(held_gpus(wait_bound(api, 20)).values()) == {1}
    written = ours.written
    wait_for("reports again", lambda: ours.written > written + 1)
    wait_for("the policy at its node", lambda: any("resolved" in spec for spec in ours.heard[-3:]))
    # 15 watches, each at least the second apart that the server asks for and later five, a lease, a report and a round
    # of the controller a second: a dozen in all. One client that tried again at once would make hundreds.
    assert 0 < rate < 40, rate


@pytest.fixture
def broken(control_plane: ControlPlane) -> Iterator[Any]:
    """Two functions: to make every write of our account fail, and to end that; at the end at the latest."""
    api = control_plane.api
    rule = {"apiGroups": ["*"], "apiVersions": ["*"], "resources": ["*/*"], "operations": ["*"]}
    hook = {
        "name": "nobody.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [rule],
        "matchConditions": [{"name": "ours", "expression": f"request.userInfo.username == '{USER}'"}],
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
    }

    def undo() -> None:
        with contextlib.suppress(ApiRefused):
            api.delete(f"{HOOKS}/nobody")

    yield lambda: api.post(HOOKS, {"metadata": {"name": "nobody"}, "webhooks": [hook]}), undo
    undo()


def test_clients_whose_writes_fail_with_500_make_them_good_once_the_server_can(
    control_plane: ControlPlane, ours: Daemon, broken: Any, order: Callable[[], None]
) -> None:
    plane, api, (begin, undo) = control_plane, control_plane.api, broken
    failed = ours.failed
    begin()
    wait_for("a report refused", lambda: ours.failed > failed)
    order()
    submit(api, 10)
    wait_for("500s of the controller", lambda: len(logged(plane, "controller", "500 InternalError")) > 3)
    wait_for("500s of the extender", lambda: logged(plane, "extender", "500 InternalError"))
    assert not list(bound_pods(api))

    undo()

    assert set(held_gpus(wait_bound(api, 10)).values()) == {1}
    written = ours.written
    wait_for("reports again", lambda: ours.written > written + 1)
    wait_for("the policy at its node", lambda: any("resolved" in spec for spec in ours.heard[-3:]))
