"""However a link between valved and offline work ends, the offline work does not run beside a service that is busy.

Beats are counted by the emulated card itself: not one may follow the stop.
"""

from __future__ import annotations

import json
import signal

import pytest
from node_rig import nothing_left_off, service, settled
from valve.v1 import node_pb2

LINKS, HANGS, DEATHS = 10, 5, 10
NO_LATE_BEAT_MS = 20_000  # where the end of a lease is not what is tested
LEASE_MS = 300
TRACE = "trace.jsonl"
RUNGS = pytest.mark.parametrize("driver", [{}, {"gsp_foreign": "deny"}], ids=["channel-own", "channel-fd"])


def busy_pair(make_node, lease_ms, **driver):
    """An offline job, stopped beside a service that stays busy. Each decision of valved is written down."""
    node = make_node(start=False, **driver)
    node.config = f'lease_ms = {lease_ms:.1f}\ntrace_file = "{node.folder / TRACE}"'
    node.start_valved()
    offline, online = settled(node)
    online.hint(1)  # from here on it is busy without a break
    online.launch(us=100)
    offline.wait_off()
    return node, offline, online


def offline_client(node):
    """The number of the job's client, 0 while it has none."""
    return next((c.id for c in node.status().clients if c.role == node_pb2.ROLE_OFFLINE), 0)


def own_stops(node, offline):
    """How often the job has stopped its own channels."""
    return sum(gate.pid == offline.process.pid and not gate.on for gate in node.emulator.state().gates)


def hang(node, offline):
    """valved stands for longer than the lease, and goes on. Returns the job's client until then."""
    before, client = own_stops(node, offline), offline_client(node)
    node.valved.send_signal(signal.SIGSTOP)
    node.wait_for(lambda: own_stops(node, offline) > before, "the job takes valved for dead")
    node.valved.send_signal(signal.SIGCONT)
    return client


def assert_no_beat(node, offline, beats):
    """Since it had so many. What ran is in the trace, and at the card."""
    trace = node.folder / TRACE  # made by a valved that lives for a second
    told = trace.read_text(errors="replace").splitlines()[-80:] if trace.exists() else []
    gates = "\n".join(f"{gate}" for gate in node.emulator.state().gates[-20:])

    assert offline.beats == beats, "\n".join([*told, gates])


def die(node, *, is_stale):
    """valved is killed, and another takes its place, which knows nobody until they come back.

    `is_stale`: its predecessor had no time to write that the online process was there.
    """
    node.stop_valved(signal.SIGKILL)
    if is_stale:
        path = node.run_dir / "state.json"
        said = json.loads(path.read_bytes())
        said["clients"] = [client for client in said["clients"] if client["role"] == node_pb2.ROLE_OFFLINE]
        said["services"] = [{**each, "gpus": []} for each in said["services"]]
        path.write_text(json.dumps(said))
    node.start_valved()


def are_back(node):
    """Both, each with its channels."""
    chat = service(node, "chat")
    return offline_client(node) and node.status().gpus[0].channels and chat and chat.gpus


@RUNGS
def test_a_process_that_closes_its_own_link_never_runs_beside_a_busy_service(make_node, driver):
    node, offline, online = busy_pair(make_node, NO_LATE_BEAT_MS, **driver)
    assert node.status().gpus[0].reach == ("channel-fd" if driver else "channel-own")
    beats = offline.beats

    for _ in range(LINKS):
        before = node.wait_for(lambda: offline_client(node), "its shim is here")
        offline.process.send_signal(signal.SIGUSR1)
        node.wait_for(lambda before=before: offline_client(node) > before, "its shim is back")
        online.launch(us=100)

    assert_no_beat(node, offline, beats)
    online.hint(0)
    offline.wait_running()


@RUNGS
def test_no_offline_beat_falls_beside_a_busy_service_when_valved_hangs_and_goes_on(make_node, driver):
    node, offline, online = busy_pair(make_node, LEASE_MS, **driver)
    beats = offline.beats

    for _ in range(HANGS):
        node.wait_for(lambda: offline_client(node), "its shim is here")
        before = hang(node, offline)
        online.launch(us=100)
        node.wait_for(lambda before=before: offline_client(node) > before, "its shim is back")
        online.launch(us=100)

    assert_no_beat(node, offline, beats)
    online.hint(0)
    offline.wait_running()


def enables_of(node, process):
    return [gate for gate in node.emulator.state().gates if gate.pid == process.pid and gate.on]


def test_a_job_that_reads_late_that_it_may_run_never_runs_beside_a_service_that_came_meanwhile(make_node):
    """Its thread stands still between valved's answer and what it does about it."""
    node, offline, online = busy_pair(make_node, LEASE_MS)
    before = hang(node, offline)
    node.wait_for(lambda: offline_client(node) > before, "its shim is back")
    node.wait_for(lambda: node.status().gpus[0].channels, "its channels are known")
    offline.process.send_signal(signal.SIGSTOP)
    online.hint(0)
    node.wait_for(lambda: not service(node, "chat").busy, "the service lets go, and valved answers")
    node.wait_for(lambda: nothing_left_off(node), "the card has heard of it, too")
    online.hint(1)
    online.launch(us=100)
    offline.wait_off()
    beats = offline.beats
    offline.process.send_signal(signal.SIGCONT)
    hang(node, offline)  # it reads what valved said before it takes valved for dead

    assert_no_beat(node, offline, beats)
    assert not enables_of(node, offline.process)
    online.hint(0)
    offline.wait_running()


@pytest.mark.parametrize("lease_ms", [NO_LATE_BEAT_MS, LEASE_MS], ids=["within-the-lease", "after-the-lease"])
def test_no_offline_beat_falls_beside_a_busy_service_when_valved_is_killed_and_started_anew(make_node, lease_ms):
    """Every other one is killed before anybody can be back, the rest once both have told of their channels."""
    node, offline, online = busy_pair(make_node, lease_ms)
    beats = offline.beats

    for death in range(DEATHS):
        die(node, is_stale=death % 3 == 0)
        online.launch(us=100)
        if death % 2:
            node.wait_for(lambda: are_back(node), "both are back")
            online.launch(us=100)

    assert_no_beat(node, offline, beats)
    online.hint(0)
    offline.wait_running()
