"""A node's Kubernetes room over fakes of everything around it: gate, kubelet, runtime and API server."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from uuid import UUID

from fake_kubelet import FakeKubelet
from fake_runtime import FakeRuntime
from fakeapi import FakeApi, until
from node_world import World
from valve_kube.client import KubeClient

from valved.config import KubeTable
from valved.kube.host import Host, KubeBooks
from valved.kube.pods import PodBook
from valved.kube.room import Room
from valved.machine.cards import CardUse
from valved.machine.clock import LoopClock
from valved.model.ids import Role

GIB = 1 << 30
RESOURCE, WHOLE = "valve.gpu/harvested-gpu", "nvidia.com/gpu"
UIDS = [f"{index}0000000-0000-4000-8000-000000000000" for index in range(1, 9)]
ONLINE_UID, OFFLINE_UID = UIDS[0], UIDS[1]


def uuid_of(world, gpu):
    return f"GPU-{UUID(bytes=world.gate.gpus()[gpu].uuid)}"


def pod(name, uid, role="", gpus="", phase="Pending", limit=None, namespace="default", **annotations):
    """As the API server lists it."""
    notes = {key.replace("_", "-"): value for key, value in annotations.items()}
    notes = {f"valve.gpu/{key}": value for key, value in {**notes, "role": role, "gpus": gpus}.items() if value}
    resources = {"limits": {limit: "1"}} if limit else {}
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": uid, "annotations": notes, "resourceVersion": "1"},
        "spec": {"containers": [{"name": "work", "resources": resources}]},
        "status": {"phase": phase},
    }


class Cards:
    """NVML, as a test wants it."""

    def __init__(self, world):
        self.uses = {
            info.uuid: CardUse(total_bytes=80 * GIB, used_bytes=0, by_pid={}, is_mig=False)
            for info in world.gate.gpus()
        }

    async def read(self):
        return dict(self.uses)

    def leave(self):
        pass


class Api(FakeApi):
    """Lists pods and the node's own object apart, finds single pods, and keeps what is written."""

    def __init__(self):
        super().__init__()
        self.own = []
        self.slices = []  # ResourceSlices
        self.claims = {}  # ResourceClaims by name
        self.claims_asked = []
        self.is_silent = False  # nobody answers for a claim
        self.reports = []
        self.created = []
        self.is_away = False
        self.ahead_s = None  # its clock, of the node's; None: it does not say when it stored a report

    async def _answer(self, head, body, writer):
        if self.is_away:
            return False
        verb, path = head.start[0], head.start[1].partition("?")[0]
        answer = None
        if "/resourceclaims/" in path:
            self.claims_asked.append(path.rpartition("/")[2])
            if self.is_silent:
                await asyncio.Event().wait()
        if verb == "PATCH" and path.endswith("/status"):
            if not self.own:
                return await self._say(writer, 404, {"reason": "NotFound", "message": "no such node"})
            answer = json.loads(body)
            self.reports.append(answer["status"])
            if self.ahead_s is not None:
                stored = datetime.fromtimestamp(time.time() + self.ahead_s, timezone.utc).isoformat(timespec="seconds")
                answer["metadata"]["managedFields"] = [{"manager": "valved", "subresource": "status", "time": stored}]
        elif verb == "POST" and path.endswith("/gpuharvestnodes"):
            answer = json.loads(body)
            self.created.append(answer)
            self.own = [answer]
        elif verb == "GET" and "/namespaces/" in path:
            name = path.rpartition("/")[2]
            known = {each["metadata"]["name"]: each for each in self.items}
            answer = (self.claims if "/resourceclaims/" in path else known).get(name)
            if answer is None:
                return await self._say(writer, 404, {"reason": "NotFound", "message": "no such object"})
        elif verb == "GET" and "watch=" not in head.start[1] and "/pods" not in path:
            items = {"gpuharvestnodes": self.own, "resourceslices": self.slices}.get(path.rpartition("/")[2], [])
            answer = {"metadata": {"resourceVersion": "1"}, "items": items}
        if answer is None:
            return await super()._answer(head, body, writer)
        return await self._say(writer, 200, answer)

    async def _say(self, writer, status, answer):
        from valve_kube import wire

        writer.write(wire.message(f"HTTP/1.1 {status} X", {}, json.dumps(answer).encode()))
        await writer.drain()
        return True


class KubeNode:
    """What a test sees. `room` is running when the context is entered, unless told otherwise."""

    def __init__(self, folder, **table):
        self.folder = folder
        self.books = KubeBooks(pods=PodBook(all_gpu_pods=table.get("all_gpu_pods", False)))
        self.world = World(folder, gpus=2, pods=self.books.pods, shares=self.books.offline.levels)
        self.kubelet = FakeKubelet(folder)
        self.runtime = FakeRuntime(folder / "nri.sock")
        self.api = Api()
        self.cards = Cards(self.world)
        self.table = KubeTable(
            node="node-1",
            device_plugins=str(self.kubelet.plugins),
            pod_resources=str(self.kubelet.pod_resources),
            shim_folder=str(folder / "shim"),
            cdi_folder=str(folder / "cdi"),
            nri_socket=str(self.runtime.path),
            **{"report_s": 0.1, **table},  # no test waits for a pace that it is not about
        )
        self.room = None
        self._running = None

    def start_room(self):
        """On the loop's own clock: sockets are real. The world's virtual clock stands still."""
        self.room = Room(self.host(), self.table, self.books, KubeClient(self.access), list_s=0.5)
        self.room.counting._cards = self.cards
        self.room.plugin._look_s = 0.05
        self._running = asyncio.ensure_future(self.room.run())

    def host(self):
        world = self.world
        return Host(
            gate=world.gate,
            books=world.books,
            gating=world.gating,
            register=world.register,
            brake=world.brake,
            ladder=world.ladder,
            endings=world.endings,
            journal=world.journal,
            clock=LoopClock(asyncio.get_running_loop()),
            processes=world.processes,
            run_dir=self.folder,
            version="test",
            kv=world.kv,
            consents=world.consents,
        )

    async def stop_room(self):
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    def put(self, item):
        self.room.book.put(item)

    def guarded(self):
        return [gpu for gpu, account in self.world.gating.gpus.items() if 0x7FFFFFFF in account.holders]


@asynccontextmanager
async def kube_node(folder, *, start=True, kubelet=True, runtime=True, prepare=lambda node: None, **table):
    node = KubeNode(folder, **table)
    prepare(node)
    async with node.api as access:
        node.access = access
        if kubelet:
            await node.kubelet.start()
        if runtime:
            await node.runtime.start()
        try:
            if start:
                node.start_room()
            yield node
        finally:
            await node.stop_room()
            if kubelet:
                await node.kubelet.stop()
            if runtime:
                await node.runtime.stop()


__all__ = ["KubeNode", "kube_node", "pod", "until", "uuid_of"]


def group(uid):
    return f"/kubepods/burstable/pod{uid}/c0ffee"


def scenario(body):
    """Run a coroutine function as a test."""

    def test(tmp_path):
        asyncio.run(asyncio.wait_for(body(tmp_path), 100))

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


def serve_online(node, gpu=0, uid=ONLINE_UID, name="chat-0", pid=200):
    """An online pod holds a GPU, and its engine has said HELLO."""
    uuid = uuid_of(node.world, gpu)
    node.put(pod(name, uid, role="online", limit=WHOLE, phase="Running"))
    node.kubelet.held.append(("default", name, "work", WHOLE, [uuid]))
    node.world.processes.add(pid, cgroup=group(uid))
    return node.world.hello(pid, wanted=Role.NONE)


async def registered(node):
    await until(lambda: node.kubelet.devices and node.room.plugin.is_registered)
