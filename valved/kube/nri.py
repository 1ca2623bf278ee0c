"""The NRI plugin: the shim into online containers as containerd creates them. The pod needs nothing in its spec.

Best effort and fail open. Every container of the node passes here under one lock of the runtime's, so the answer comes
from memory; and an error status, or an answer nobody can parse, would fail every creation on the node, so whatever
goes wrong becomes an empty success. A plugin that is dead or slow only means a container without the shim: the guard
(policy/guard.py) then leaves its GPUs alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from valve.kube import nri_pb2 as pb
from valve_kube.injection import (
    ContainerTraits,
    InjectionSettings,
    PodTraits,
    Skipped,
    check_pod,
    holds_gpu,
    inject,
)

from valved.kube.pods import Pod, PodBook
from valved.kube.ttrpc import Broken, TtrpcSession
from valved.model.ids import Role

log = logging.getLogger("valved.kube")

NAME, ORDER, NRI_VERSION = "valve", "40", "0.12.0"
RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"
CREATE_CONTAINER = 1 << 3  # bit (event - 1); a mask of 0 would subscribe to everything
REGISTER_S = 5.0  # the runtime's own patience
BACKOFF_S = (0.1, 1.0)  # a look at a socket costs nothing, and what starts meanwhile has no shim
ALIVE = (1, 2, 3)  # created, paused, running


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """An online container with GPUs that runs without the shim."""

    pod_uid: str
    name: str  # namespace/pod/container
    reason: str


@dataclass(slots=True, kw_only=True)
class Seen:
    """What became of the containers that passed here, for the report."""

    injected: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # by reason
    failed: int = 0  # exceptions turned into an empty success
    bare: dict[str, Bare] = field(default_factory=dict)  # by container id


class Injector:
    """Requests of the runtime and their answers. Plain functions of what is in memory."""

    def __init__(
        self,
        book: PodBook,
        settings: InjectionSettings,
        *,
        exists: Callable[[str], bool] = lambda path: Path(path).is_dir(),
    ) -> None:
        self.seen = Seen()
        self._book = book
        self._settings = settings
        self._exists = exists

    def handle(self, service: str, method: str, payload: bytes) -> bytes:
        """Never raises; the worst answer is an empty one."""
        try:
            return self._dispatch(method, payload)
        except Exception:
            self.seen.failed += 1
            log.exception("NRI request failed and got an empty answer", extra={"facts": {"method": method}})
            return b""

    def _dispatch(self, method: str, payload: bytes) -> bytes:
        match method:
            case "Configure":
                return pb.ConfigureResponse(events=CREATE_CONTAINER).SerializeToString()
            case "Synchronize":
                return self.synchronize(pb.SynchronizeRequest.FromString(payload)).SerializeToString()
            case "CreateContainer":
                return self.create(pb.CreateContainerRequest.FromString(payload)).SerializeToString()
        return b""

    def synchronize(self, request: pb.SynchronizeRequest) -> pb.SynchronizeResponse:
        """What runs already: too late to inject, but operators want to know."""
        sandboxes = {pod.id: pod for pod in request.pods}
        for container in request.containers:
            sandbox = sandboxes.get(container.pod_sandbox_id)
            if sandbox is None or container.state not in ALIVE or self._has_shim(container):
                continue
            pod = self._pod(sandbox)
            if pod.role is Role.ONLINE and self._wants(pod, container):
                self._note(pod, container, "older than the plugin")
        if not request.more:
            log.info("the runtime now asks about every new container")
        return pb.SynchronizeResponse(more=request.more)

    def create(self, request: pb.CreateContainerRequest) -> pb.CreateContainerResponse:
        pod = self._pod(request.pod)
        if pod.role is not Role.ONLINE or not self._wants(pod, request.container):
            return pb.CreateContainerResponse()
        try:
            adjust = self._adjust(pod, request.pod, request.container)
        except Skipped as reason:
            self.seen.skipped[str(reason)] = self.seen.skipped.get(str(reason), 0) + 1
            self._note(pod, request.container, str(reason))
            return pb.CreateContainerResponse()
        self.seen.injected += 1
        return pb.CreateContainerResponse(adjust=adjust)

    def _pod(self, sandbox: pb.PodSandbox) -> Pod:
        metadata = {"labels": dict(sandbox.labels), "annotations": dict(sandbox.annotations)}
        return self._book.heard(sandbox.uid, sandbox.namespace, sandbox.name, metadata)

    def bare(self) -> list[Bare]:
        """Those whose pods still live."""
        gone = [key for key, one in self.seen.bare.items() if not self._lives(one.pod_uid)]
        for key in gone:
            del self.seen.bare[key]
        return list(self.seen.bare.values())

    def has_shim(self, pod: Pod, container: str) -> bool:
        """As far as valved knows: while the runtime does not answer, nothing is noted."""
        return pod.role is Role.ONLINE and all(one.name != f"{pod.key}/{container}" for one in self.bare())

    def _lives(self, uid: str) -> bool:
        pod = self._book.pods.get(uid)
        return pod is not None and not pod.finished

    def _note(self, pod: Pod, container: pb.Container, reason: str) -> None:
        name = f"{pod.key}/{container.name}"
        self.seen.bare[container.id] = Bare(pod_uid=pod.uid, name=name, reason=reason)
        log.info("online container runs without the shim", extra={"facts": {"container": name, "reason": reason}})

    def _wants(self, pod: Pod, container: pb.Container) -> bool:
        """Whole GPUs by the pod's own words, else by what a device plugin left on the container."""
        if pod.gpu_containers is not None:
            return container.name in pod.gpu_containers
        return holds_gpu(container.env, [device.name for device in container.cdi_devices])

    def _has_shim(self, container: pb.Container) -> bool:
        return any(entry.startswith("LD_PRELOAD=") and self._settings.preload in entry for entry in container.env)

    def _adjust(self, pod: Pod, sandbox: pb.PodSandbox, container: pb.Container) -> pb.ContainerAdjustment:
        traits = PodTraits(wish=pod.wish, host_pid=pod.host_pid, runtime=sandbox.runtime_handler)
        check_pod(traits, self._settings)
        preload = next((entry[len("LD_PRELOAD=") :] for entry in container.env if entry.startswith("LD_PRELOAD=")), "")
        taken = {mount.destination: mount.source for mount in container.mounts}
        injection = inject(ContainerTraits(preload=preload, mounts=taken), self._settings)
        missing = [source for source, _ in injection.mounts if not self._exists(source)]
        if missing:
            # A bind mount of nothing would make the container's start fail.
            raise Skipped("node-not-ready")
        return pb.ContainerAdjustment(
            env=[pb.KeyValue(key="LD_PRELOAD", value=injection.preload)] if injection.preload is not None else [],
            mounts=[
                pb.Mount(destination=path, type="bind", source=source, options=["rbind", "ro"])
                for source, path in injection.mounts
            ],
        )


class NriConnection:
    """Stays registered with the runtime until cancelled. Containers created in a gap start uninjected."""

    def __init__(self, socket: Path, injector: Injector) -> None:
        self.is_registered = False
        self._socket = socket
        self._injector = injector

    async def run(self) -> None:
        backoff_s = BACKOFF_S[0]
        while True:
            try:
                await self._once()
            except (Broken, OSError) as error:
                if self.is_registered:
                    backoff_s = BACKOFF_S[0]
                    log.warning("NRI connection lost", extra={"facts": {"error": str(error)}})
                self.is_registered = False
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_S[1])

    async def _once(self) -> None:
        reader, writer = await asyncio.open_unix_connection(str(self._socket))
        session = TtrpcSession(reader, writer, self._injector.handle)
        reading = asyncio.ensure_future(session.run())
        try:
            request = pb.RegisterPluginRequest(plugin_name=NAME, plugin_idx=ORDER, nri_version=NRI_VERSION)
            registering = session.call(RUNTIME_SERVICE, "RegisterPlugin", request.SerializeToString(), REGISTER_S)
            await registering
            self.is_registered = True
            log.info("registered with the runtime", extra={"facts": {"socket": str(self._socket)}})
            await reading
        finally:
            reading.cancel()
            session.close()
            await asyncio.gather(reading, return_exceptions=True)
