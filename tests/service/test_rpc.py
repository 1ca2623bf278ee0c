"""The API over a real socket, and the metrics over real HTTP; the node behind is virtual."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from functools import partial
from types import SimpleNamespace

import grpc
import pytest
from node_world import World
from prometheus_client.parser import text_string_to_metric_families
from valve.v1 import node_pb2, node_pb2_grpc

from valved.cli import words
from valved.cli.client import explain_error
from valved.config import Config, check
from valved.errors import ConfigError
from valved.machine import helpers
from valved.metrics import render
from valved.model.events import EventKind
from valved.paths import grpc_address
from valved.rpc import convert, node
from valved.rpc.server import serve, serve_view
from valved.scraping import serve_metrics

PATIENCE_S = 200.0  # ends only a hung test


class Api:
    """A served virtual node and a stub to it, inside one asyncio run."""

    def __init__(self, folder):
        self.world = World(folder)
        self.path = folder / "valved.sock"

    async def __aenter__(self):
        self.server = await serve(self.world.node, self.path)
        self.channel = grpc.aio.insecure_channel(grpc_address(self.path))
        self.stub = node_pb2_grpc.NodeStub(self.channel)
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
        await self.server.stop(0)


def with_api(folder, story):
    async def run():
        async with Api(folder) as api:
            return await asyncio.wait_for(story(api), PATIENCE_S)

    return asyncio.run(run())


def test_no_order_is_ever_on_record_without_the_user_whom_the_kernel_names(tmp_path):
    """What a caller calls itself stands behind it, however long that is."""

    async def story(api):
        await api.stub.Pause(node_pb2.PauseRequest(by="root " * 40))
        await api.stub.Resume(node_pb2.ResumeRequest())
        await api.stub.SetPolicy(node_pb2.Policy(mode=node_pb2.MODE_OBSERVE))
        await api.stub.SetPolicy(node_pb2.Policy(cooldown_floor_ns=7_000_000))
        await api.stub.Drain(node_pb2.DrainRequest(by="valve drain"))
        (paused,) = api.world.events(EventKind.PAUSED)
        policy = api.world.events(EventKind.POLICY)
        assert [event.reason for event in policy] == ["resume", "mode observe", "cooldown", "drain"]
        assert policy[2].detail["floor_ns"] == 7_000_000
        said = [paused.reason.removeprefix("by "), *(event.detail["by"] for event in policy)]
        assert [by.partition(" (")[0] for by in said] == [f"uid {os.getuid()}"] * len(said)

    with_api(tmp_path, story)


def test_the_status_travels_whole(tmp_path):
    async def story(api):
        api.world.offline(name="batch")
        online = api.world.online(name="chat")
        api.world.run(100)
        api.world.gate.launch(online)
        api.world.run(1)
        return await api.stub.GetStatus(node_pb2.GetStatusRequest())

    status = with_api(tmp_path, story)

    assert (status.version, status.mode, status.driver.branch) == ("test", node_pb2.MODE_HARVEST, 580)
    assert [(service.name, service.role) for service in status.services] == [
        ("batch", node_pb2.ROLE_OFFLINE),
        ("chat", node_pb2.ROLE_ONLINE),
    ]
    assert status.gpus[0].gated
    assert sum(status.gpus[0].preempt_latency.count) == 1
    assert status.services[1].preemptions == 1
    assert status.clients[1].submitted == 1
    assert status.counters.gates >= 1


def test_only_the_owner_and_the_group_may_call(tmp_path):
    async def story(api):
        return stat.S_IMODE(api.path.stat().st_mode)

    assert with_api(tmp_path, story) == 0o660


def test_a_launch_that_valved_cannot_look_at_now_is_answered_as_by_no_valved_at_all(tmp_path):
    """`valve run --online` leaves a claim then; on any other answer its command would run unprotected for good."""

    async def story(api):
        def cannot_look(pid):
            raise OSError(errno.EMFILE, "Too many open files")

        api.world.processes.start_time = cannot_look
        request = node_pb2.LaunchRequest(pid=200, start_time=2000, role=node_pb2.ROLE_ONLINE, name="chat")
        with pytest.raises(grpc.RpcError) as refused:
            await api.stub.Launch(request)
        return explain_error(refused.value, tmp_path)

    found = with_api(tmp_path, story)

    assert found.is_silence
    assert "Too many open files" in str(found), "valved runs, and says itself what it lacks"
    assert "valve up" not in found.next_step


def test_a_process_is_claimed_over_the_api(tmp_path):
    async def story(api):
        api.world.processes.add(200)
        request = node_pb2.LaunchRequest(pid=200, start_time=2000, role=node_pb2.ROLE_ONLINE, name="chat")
        reply = await api.stub.Launch(request)
        return reply.service, api.world.hello(200, wanted=1).last.service

    claimed, given = with_api(tmp_path, story)

    assert claimed == given


def test_an_error_carries_its_kind_the_field_and_the_next_step(tmp_path):
    async def story(api):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.stub.Launch(node_pb2.LaunchRequest(pid=4, start_time=1, role=node_pb2.ROLE_ONLINE))
        return caught.value

    error = with_api(tmp_path, story)
    extra = dict(error.trailing_metadata())
    problem = node_pb2.Problem.FromString(extra["valve-problem-bin"])

    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert problem.field == extra["valve-field"] == "start_time"
    assert "/proc/PID/stat" in problem.next_step
    assert "process 4" in error.details()


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda s: s.Explain(node_pb2.ExplainRequest(gpu=9)), grpc.StatusCode.NOT_FOUND),
        (lambda s: s.Explain(node_pb2.ExplainRequest()), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda s: s.SetPolicy(node_pb2.Policy(cooldown_floor_ns=10**15)), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda s: s.SetPolicy(node_pb2.Policy(mode=99)), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda s: s.Launch(node_pb2.LaunchRequest(pid=1)), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_each_kind_of_error_has_its_code(tmp_path, call, code):
    async def story(api):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(api.stub)
        return caught.value.code()

    assert with_api(tmp_path, story) is code


def test_policy_fields_left_at_zero_keep_their_value(tmp_path):
    async def story(api):
        before = await api.stub.GetPolicy(node_pb2.GetPolicyRequest())
        after = await api.stub.SetPolicy(node_pb2.Policy(cooldown_floor_ns=7_000_000))
        return before, after

    before, after = with_api(tmp_path, story)

    assert after.cooldown_floor_ns == 7_000_000
    assert (after.mode, after.cooldown_start_ns) == (before.mode, before.cooldown_start_ns)


def test_pause_resume_and_drain_answer_with_the_new_state(tmp_path):
    async def story(api):
        paused = await api.stub.Pause(node_pb2.PauseRequest(by="me"))
        resumed = await api.stub.Resume(node_pb2.ResumeRequest())
        drained = await api.stub.Drain(node_pb2.DrainRequest(by="me", stop=True))
        return paused, resumed, drained, api.world.stopped

    paused, resumed, drained, stopped = with_api(tmp_path, story)

    assert (paused.paused, paused.paused_by) == (True, f"uid {os.getuid()} (me)")
    assert not resumed.paused
    assert drained.draining
    assert stopped


class BusyDisk:
    """Takes each job when it is told to, which is later than its caller waits."""

    def __init__(self):
        self.left = []

    def do(self, job):
        self.left.append(job)
        raise TimeoutError(errno.ETIMEDOUT, helpers.NO_ANSWER)

    def ask(self, question):
        if self.left:
            raise TimeoutError(errno.ETIMEDOUT, helpers.NO_ANSWER)
        return question()

    def take(self):
        while self.left:
            self.left.pop(0)()


@pytest.mark.parametrize(
    ("order", "is_closed"),
    [(node_pb2.PauseRequest(by="me"), True), (node_pb2.DrainRequest(), True), (node_pb2.ResumeRequest(), False)],
)
def test_no_operator_is_ever_told_of_a_failure_for_an_order_that_its_disk_takes_a_moment_later(
    tmp_path, monkeypatch, order, is_closed
):
    monkeypatch.setattr(node, "LATE_S", PATIENCE_S)

    async def story(api):
        method = type(order).__name__.removesuffix("Request")
        if not is_closed:
            api.world.node.pause("me")
        api.world.brake._files = disk = BusyDisk()
        asked = asyncio.ensure_future(getattr(api.stub, method)(order))
        while not disk.left:
            await asyncio.sleep(0.001)
        disk.take()
        return await asked, api.world.brake.switches

    status, switches = with_api(tmp_path, story)

    assert not status.unwritten
    assert (status.paused or status.draining) is is_closed
    assert switches.is_closed is is_closed


@pytest.mark.parametrize("order", [node_pb2.PauseRequest(by="me"), node_pb2.DrainRequest(), node_pb2.ResumeRequest()])
def test_no_order_is_ever_called_a_failure_because_the_loop_stood_while_its_disk_took_it(tmp_path, monkeypatch, order):
    """For longer than it waits: nobody looked again."""
    now_s = 1000.0
    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def story(api):
        nonlocal now_s
        is_resume, looks = isinstance(order, node_pb2.ResumeRequest), []
        if is_resume:
            api.world.node.pause("me")
        api.world.brake._files, look = (disk := BusyDisk()), api.world.node.look
        api.world.node.look = lambda: (look(), looks.append(now_s))
        asked = asyncio.ensure_future(getattr(api.stub, type(order).__name__.removesuffix("Request"))(order))
        while not looks:
            await asyncio.sleep(0.001)
        disk.take()
        now_s += 2 * node.LATE_S
        status = await asked
        return not status.unwritten and (status.paused or status.draining) is not is_resume

    assert with_api(tmp_path, story)


@pytest.mark.parametrize("order", ["pause", "drain"])
def test_a_resume_that_meets_an_order_of_another_is_never_told_that_the_disk_does_not_answer(
    tmp_path, monkeypatch, order
):
    monkeypatch.setattr(node, "LATE_S", PATIENCE_S)

    async def story(api):
        api.world.node.pause("me")
        api.world.brake._files = disk = BusyDisk()
        asked = asyncio.ensure_future(api.stub.Resume(node_pb2.ResumeRequest()))
        while not disk.left:
            await asyncio.sleep(0.001)
        disk.take()
        (tmp_path / order).write_text("another\n")
        return await asked

    status = with_api(tmp_path, story)

    assert (status.paused_by, status.draining) == (("another", False) if order == "pause" else ("", True))


def test_a_drain_that_ends_valved_never_goes_on_after_a_resume_whose_disk_was_slow(tmp_path, monkeypatch):
    """No file says that drain, so the end of none ends it."""
    monkeypatch.setattr(node, "LATE_S", PATIENCE_S)

    async def story(api):
        api.world.offline()
        assert (await api.stub.Drain(node_pb2.DrainRequest(stop=True))).draining
        api.world.brake._files = disk = BusyDisk()
        asked = asyncio.ensure_future(api.stub.Resume(node_pb2.ResumeRequest()))
        while not disk.left:
            await asyncio.sleep(0.001)
        disk.take()
        return (await asked).draining

    assert not with_api(tmp_path, story)


def test_orders_of_a_user_that_wait_for_a_disk_never_hold_the_loop_once_it_answers(tmp_path, monkeypatch):
    """Each status takes 18 ms where 164 processes are: those of 64 orders took 0.7 s in one turn of the loop."""
    monkeypatch.setattr(node, "Crowd", partial(node.Crowd, own=frozenset()))  # this process is a user like any other
    waiting, told = [], []

    async def story(api):
        whole = api.world.node.status
        monkeypatch.setattr(api.world.node, "when_saved", lambda then, within_ns: waiting.append(then))
        monkeypatch.setattr(api.world.node, "status", lambda: (told.append(1), whole())[1])
        orders = asyncio.gather(*(api.stub.Pause(node_pb2.PauseRequest()) for _ in range(4)))
        while len(waiting) < 4:
            await asyncio.sleep(0.001)
        for then in waiting:
            then(True)
        most = 0
        while not orders.done():
            before = len(told)
            await asyncio.sleep(0)
            most = max(most, len(told) - before)
        return most, await orders

    most, answers = with_api(tmp_path, story)

    assert most == 1
    assert all(answer.paused for answer in answers)


@pytest.mark.parametrize("order", [node_pb2.PauseRequest(by="me"), node_pb2.ResumeRequest()])
def test_no_order_is_ever_said_to_be_done_while_its_disk_hangs(tmp_path, monkeypatch, order):
    monkeypatch.setattr(node, "LATE_S", 0.01)

    async def story(api):
        api.world.brake._files = BusyDisk()
        return await getattr(api.stub, type(order).__name__.removesuffix("Request"))(order)

    with contextlib.ExitStack() as refused:
        if isinstance(order, node_pb2.ResumeRequest):
            refused.enter_context(pytest.raises(grpc.RpcError, match="does not answer"))
        assert with_api(tmp_path, story).unwritten


def test_events_are_watched_as_they_happen(tmp_path):
    async def story(api):
        call = api.stub.Watch(node_pb2.WatchRequest(kinds=["paused", "resumed"]))
        await call.wait_for_connection()
        api.world.node.pause("me")
        api.world.node.resume()
        events = [await call.read(), await call.read()]
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call.read()
        while api.world.journal._watchers:
            await asyncio.sleep(0.001)
        return events

    events = with_api(tmp_path, story)

    assert [event.kind for event in events] == ["paused", "resumed"]
    assert events[0].reason == "by me"


def test_an_unknown_kind_of_event_is_refused_with_the_known_ones(tmp_path):
    async def story(api):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.stub.Watch(node_pb2.WatchRequest(kinds=["nonsense"])).read()
        return dict(caught.value.trailing_metadata())["valve-next-step"]

    assert "paused" in with_api(tmp_path, story)


def test_an_explanation_travels_with_its_decisions(tmp_path):
    async def story(api):
        api.world.offline()
        online = api.world.online()
        api.world.work(online, ms=5)
        api.world.run(500)
        api.world.work(online, ms=500)
        return await api.stub.Explain(node_pb2.ExplainRequest(gpu=0))

    answer = with_api(tmp_path, story)

    assert answer.summary.startswith("GPU 0")
    kinds = {event.kind for event in answer.decisions}
    assert kinds >= {"decided", "wake"}
    assert "channel-added" not in kinds, "ten lines a process would drown the decisions"


# Metrics


def test_every_promise_is_a_metric(tmp_path):
    world = World(tmp_path)
    world.offline(name="batch")
    online = world.online(name="chat")
    hook = world.hook(online)
    for number in range(1, 4):
        world.run(50)
        world.gate.hint(hook, number, number - 1)
        world.work(online, ms=5)
        world.gate.hint(hook, number, number)
        world.run(50)

    families = {family.name: family for family in text_string_to_metric_families(render(world.node.status).decode())}

    def value(metric, **labels):
        samples = [s for family in families.values() for s in family.samples if s.name == metric]
        return next(s.value for s in samples if labels.items() <= s.labels.items())

    assert value("valve_preemption_latency_seconds_count", gpu="0") == 3
    assert value("valve_preemption_latency_seconds_bucket", gpu="0", le="0.001") == 3
    assert value("valve_requests_by_preemptions_total", name="chat", preemptions="1") == 3
    assert value("valve_service_max_preemptions_per_request", name="chat") == 1
    assert value("valve_harvest_seconds_total", gpu="0") > 0
    assert value("valve_owner_harvest_seconds_total", name="batch") > 0
    assert value("valve_mode", mode="harvest") == 1
    assert all(family.documentation for family in families.values())


PAGES = ("/metrics", "/secret", "/healthz", "/readyz", "/readyz")


def test_metrics_and_probes_are_served_over_http_and_nothing_else_is(tmp_path):
    async def fetch(port, path):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return answer.decode()

    async def run():
        world = World(tmp_path)
        missing = ["no kubelet", ""]
        server = await serve_metrics("127.0.0.1", 0, world.node.status, missing=lambda: missing.pop(0))
        port = server.sockets[0].getsockname()[1]
        answers = [await asyncio.wait_for(fetch(port, path), PATIENCE_S) for path in PAGES]
        server.close()
        return answers

    good, bad, healthy, unready, ready = asyncio.run(run())

    assert good.startswith("HTTP/1.1 200")
    assert "# HELP valve_harvest_seconds_total" in good
    assert bad.startswith("HTTP/1.1 404")
    assert healthy.startswith("HTTP/1.1 200")
    assert (unready.startswith("HTTP/1.1 503"), unready.endswith("not ready: no kubelet\n")) == (True, True)
    assert ready.startswith("HTTP/1.1 200")


def test_who_may_only_look_never_changes_anything(tmp_path):
    changes = {
        "SetPolicy": node_pb2.Policy(mode=node_pb2.MODE_OFF),
        "Launch": node_pb2.LaunchRequest(pid=1, start_time=1, role=node_pb2.ROLE_ONLINE),
        "Pause": node_pb2.PauseRequest(),
        "Resume": node_pb2.ResumeRequest(),
        "Drain": node_pb2.DrainRequest(),
    }
    asked = {"GetStatus": node_pb2.GetStatusRequest(), "GetPolicy": node_pb2.GetPolicyRequest()}

    async def story(api):
        path = tmp_path / "view.sock"
        view = await serve_view(api.world.node, path, "*")
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        async with grpc.aio.insecure_channel(grpc_address(path)) as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            for name, request in asked.items():
                await getattr(stub, name)(request)
            found = {}
            for name, request in changes.items():
                try:
                    await getattr(stub, name)(request)
                except grpc.aio.AioRpcError as error:
                    found[name] = error.code()
        await view.stop(0)
        return found

    everything = {method.name for method in node_pb2.DESCRIPTOR.services_by_name["Node"].methods}
    assert everything == changes.keys() | asked.keys() | {"Explain", "Watch"}, "a new method: may who looks call it?"
    assert with_api(tmp_path, story) == dict.fromkeys(changes, grpc.StatusCode.PERMISSION_DENIED)


def test_a_group_that_nobody_has_never_leaves_the_api_to_another():
    with pytest.raises(ConfigError, match="group = 'nobody-has-this': this machine has no such group"):
        check(Config(group="nobody-has-this"))


@pytest.mark.parametrize("flood", [EventKind.GATE, EventKind.MALFORMED])
@pytest.mark.parametrize("kinds", [["paused"], []], ids=["asked for", "all"])
def test_what_matters_is_never_pushed_out_by_edges_or_peers_and_a_reader_gets_it_late(tmp_path, kinds, flood):
    async def story(api):
        api.world.journal = api.world.node._journal
        api.world.node.pause("alice")
        offline = api.world.offline()
        online = api.world.online()
        for _ in range(api.world.config.ring_events):
            api.world.journal.emit(flood, gpus=(0,))
        assert offline != online
        call = api.stub.Watch(node_pb2.WatchRequest(kinds=kinds, since_seq=0))
        metadata = {item[0]: item[1] for item in await call.initial_metadata()}
        first = await call.read()
        call.cancel()
        return int(metadata["valve-kept"]) > 1, first.kind, first.reason, first.lost

    assert with_api(tmp_path, story) == (not kinds, "paused", "by alice", 0)


def test_a_reclaim_of_seconds_is_never_beyond_the_buckets_of_its_histogram(tmp_path):
    world = World(tmp_path)
    world.kv.log.phases["total"].add(25_000_000_000)
    status = convert.fill(node_pb2.Status(), world.node.status())
    total = next(phase.latency for phase in status.memory.phases if phase.name == "total")

    assert words.quantile_us(total, 1.0) == 30_000_000
    assert len(total.count) == len(total.bound_us) + 1
