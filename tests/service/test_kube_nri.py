"""NRI: the shim into online containers as the runtime creates them, and nothing that could stop a container.

The runtime's side is written a second time (support/cluster/fake_runtime.py) and speaks over a real socket.
"""

from __future__ import annotations

import asyncio
import os

import pytest
from fake_runtime import FakeRuntime
from fakeapi import until
from hypothesis import given
from hypothesis import strategies as st
from valve.kube import nri_pb2 as pb
from valve_kube.injection import InjectionSettings

from valved.kube.nri import CREATE_CONTAINER, Injector, NriConnection
from valved.kube.pods import PodBook

SETTINGS = InjectionSettings()
SHIM = SETTINGS.preload
MOUNTS = [(source, path) for source, path in SETTINGS.mounts]


def sandbox(role="online", uid="u1", **annotations):
    notes = {f"valve.gpu/{key}": value for key, value in {"role": role, **annotations}.items()}
    return pb.PodSandbox(id="s-" + uid, uid=uid, name="chat-0", namespace="serving", annotations=notes)


def container(*env, mounts=(), name="engine", gpu="GPU-1", state=0, sandbox_id="s-u1"):
    visible = [f"NVIDIA_VISIBLE_DEVICES={gpu}"] if gpu else []
    listed = [pb.Mount(destination=path, source=source) for source, path in mounts]
    return pb.Container(
        id="c-" + name, name=name, env=[*visible, *env], mounts=listed, state=state, pod_sandbox_id=sandbox_id
    )


def injector(**more):
    return Injector(PodBook(), SETTINGS, **{"exists": lambda path: True, **more})


def create(plugin, pod, made):
    return plugin.create(pb.CreateContainerRequest(pod=pod, container=made)).adjust


def test_an_online_container_with_a_gpu_gets_preload_and_mounts():
    adjust = create(injector(), sandbox(), container("A=1"))

    assert [(entry.key, entry.value) for entry in adjust.env] == [("LD_PRELOAD", SHIM)]
    assert [(m.source, m.destination, list(m.options)) for m in adjust.mounts] == [
        (source, path, ["rbind", "ro"]) for source, path in MOUNTS
    ]


def test_the_image_s_own_preload_stays_behind_ours():
    """The webhook cannot see it; here the environment is the final one."""
    adjust = create(injector(), sandbox(), container("LD_PRELOAD=/usr/lib/libjemalloc.so"))

    assert adjust.env[0].value == f"{SHIM}:/usr/lib/libjemalloc.so"


def test_a_container_that_has_everything_is_not_touched():
    """Injected by the webhook, or by the other of our two instances during an upgrade: two who set the same variable
    would fail the creation."""
    adjust = create(injector(), sandbox(), container(f"LD_PRELOAD={SHIM}", mounts=MOUNTS))

    assert adjust == pb.ContainerAdjustment()


@pytest.mark.parametrize(
    ("pod", "made"),
    [
        (sandbox(role="offline"), container()),
        (sandbox(role=""), container()),
        (sandbox(), container(gpu="")),
        (sandbox(), container(gpu="all")),  # the image's own, without a request
        (sandbox(), container(gpu="void")),
    ],
)
def test_others_are_not_touched(pod, made):
    plugin = injector()

    assert create(plugin, pod, made) == pb.ContainerAdjustment()
    assert plugin.bare() == []


def test_the_pod_s_own_requests_decide_over_what_the_container_carries():
    book = PodBook()
    limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    spec = {"containers": [{"name": "engine", **limits}, {"name": "sidecar"}]}
    metadata = {"uid": "u1", "name": "chat-0", "namespace": "serving", "annotations": {"valve.gpu/role": "online"}}
    book.put({"metadata": metadata, "spec": spec})
    plugin = Injector(book, SETTINGS, exists=lambda path: True)

    assert create(plugin, sandbox(), container(gpu="", name="engine")).env
    assert not create(plugin, sandbox(), container(name="sidecar")).env


@pytest.mark.parametrize(
    ("pod", "made", "more", "why"),
    [
        (sandbox(inject="false"), container(), {}, "opt-out"),
        (sandbox(), container(mounts=[("/mine", "/run/valve")]), {}, "mount-path-taken"),
        (sandbox(), container(), {"exists": lambda path: False}, "node-not-ready"),
    ],
)
def test_a_container_in_doubt_is_left_alone_and_reported(pod, made, more, why):
    plugin = injector(**more)

    assert create(plugin, pod, made) == pb.ContainerAdjustment()
    assert [(one.name, one.reason) for one in plugin.bare()] == [("serving/chat-0/engine", why)]
    assert plugin.seen.skipped == {why: 1}


def test_online_containers_older_than_the_plugin_are_reported_until_their_pod_is_gone():
    plugin = injector()
    found = [
        container(name="bare", state=3),
        container(f"LD_PRELOAD={SHIM}", name="injected", state=3),
        container(name="ended", state=4),
        container(name="orphan", state=3, sandbox_id="unknown"),
    ]

    plugin.synchronize(pb.SynchronizeRequest(pods=[sandbox()], containers=found))

    assert [(one.name, one.reason) for one in plugin.bare()] == [("serving/chat-0/bare", "older than the plugin")]

    plugin._book.drop({"metadata": {"uid": "u1"}})

    assert plugin.bare() == []


@given(st.sampled_from(["Configure", "Synchronize", "CreateContainer", "StateChange", "Shutdown", "Odd"]), st.binary())
def test_no_request_whatever_gets_an_error(method, payload):
    """An error status, or an answer nobody can parse, would fail every container creation on the node."""
    answer = injector().handle("nri.pkg.api.v1alpha1.Plugin", method, payload)

    kinds = {"Configure": pb.ConfigureResponse, "Synchronize": pb.SynchronizeResponse}
    kinds.get(method, pb.CreateContainerResponse).FromString(answer)


def scenario(body):
    def test(tmp_path):
        async def run():
            runtime = FakeRuntime(tmp_path / "nri.sock")
            connection = NriConnection(runtime.path, injector())
            running = asyncio.ensure_future(connection.run())
            try:
                await body(runtime, connection)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                if runtime._server is not None:
                    await runtime.stop()

        asyncio.run(asyncio.wait_for(run(), 100))

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


@scenario
async def test_the_plugin_registers_asks_for_creations_only_and_answers(runtime, connection):
    await runtime.start()
    await until(lambda: connection.is_registered)

    assert [(one.plugin_name, one.plugin_idx) for one in runtime.registered] == [("valve", "40")]
    configured = pb.ConfigureResponse.FromString(await runtime.request("Configure", pb.ConfigureRequest()))
    assert configured.events == CREATE_CONTAINER == 8  # 0 would mean every event there is

    more = pb.SynchronizeResponse.FromString(await runtime.request("Synchronize", pb.SynchronizeRequest(more=True)))
    assert more.more

    adjust = await runtime.create(sandbox(), container())
    assert adjust.env[0].value == SHIM


@scenario
async def test_large_messages_travel_in_small_frames(runtime, connection):
    """The runtime reads through a buffer of 4,096 bytes and hangs up on more; its own messages are cut anywhere."""
    runtime._chunk = 1000
    await runtime.start()
    await until(lambda: connection.is_registered)
    old = "/" + "x" * 50_000 + ".so"

    adjust = await runtime.create(sandbox(), container(f"LD_PRELOAD={old}"))

    assert adjust.env[0].value == f"{SHIM}:{old}"
    assert runtime.largest <= 4096


@scenario
async def test_garbage_in_a_request_is_answered_with_nothing(runtime, connection):
    await runtime.start()
    await until(lambda: connection.is_registered)

    assert await runtime.request("CreateContainer", b"\xff\xff\xff") == b""
    assert (await runtime.create(sandbox(), container())).env


@scenario
async def test_a_runtime_that_restarts_is_registered_with_again(runtime, connection):
    for round_ in range(3):
        await runtime.start()
        await until(lambda round_=round_: len(runtime.registered) == round_ + 1 and connection.is_registered)
        await runtime.stop()
        await until(lambda: not connection.is_registered)


@scenario
async def test_requests_before_the_end_of_registration_are_served(runtime, connection):
    """Configure and Synchronize come while RegisterPlugin is still under way."""
    runtime.mute = True
    await runtime.start()
    await until(lambda: runtime._writer is not None)

    assert (
        await runtime.request("Configure", pb.ConfigureRequest()) == pb.ConfigureResponse(events=8).SerializeToString()
    )


def test_without_a_runtime_the_plugin_waits_quietly(tmp_path):
    async def run():
        connection = NriConnection(tmp_path / "nowhere.sock", injector())
        running = asyncio.ensure_future(connection.run())
        await asyncio.sleep(0.3)

        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert not os.listdir(tmp_path)
