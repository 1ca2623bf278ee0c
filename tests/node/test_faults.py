"""What fails on one side must not reach the other: the compute rows of the failure table in ARCHITECTURE.md.

Real processes are killed. Afterwards no channel is left off, no online launch was refused, and valved's books balance.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import struct
import subprocess
import time

import pytest
from node_rig import Online, nothing_left_off, service, settled


def gone_without_trace(node):
    """Nobody is left on the node: the books and the card must both be empty."""
    node.wait_for(lambda: not node.status().clients, "every client is forgotten")
    node.wait_for(lambda: nothing_left_off(node), "no channel is off")
    assert node.status().gpus[0].channels == 0


def valve(node, *arguments):
    subprocess.run(node.valve_command(*arguments), check=True, env=node.environment(), capture_output=True)


def end(*workloads):
    for each in workloads:
        each.process.kill()
        each.process.wait()


def test_an_online_service_that_is_killed_while_it_holds_gives_its_gpu_back(node):
    offline, online = settled(node)
    online.launch(us=100)
    offline.wait_stopped()

    end(online)

    offline.wait_running()
    end(offline)
    gone_without_trace(node)


def test_an_offline_job_that_is_killed_while_it_is_stopped_disturbs_nobody(node):
    offline, online = settled(node)
    online.launch(us=100)
    offline.wait_stopped()

    end(offline)

    node.wait_for(lambda: node.status().gpus[0].channels == 0, "its channels leave the books")
    online.launch(us=100)
    end(online)
    gone_without_trace(node)


def test_a_daemon_that_is_killed_never_shows_in_the_online_process(node):
    offline, online = settled(node)

    node.stop_valved(signal.SIGKILL)

    for _ in range(20):
        online.launch(us=50)
    assert online.process.poll() is None
    assert offline.process.poll() is None


def test_offline_work_stops_itself_when_the_daemon_is_gone_and_goes_on_when_one_is_back(node):
    offline, online = settled(node)

    node.stop_valved(signal.SIGKILL)
    offline.wait_stopped()
    online.launch(us=50)
    node.start_valved()

    node.wait_for(lambda: len(node.status().clients) >= 2, "both clients are back")
    offline.wait_running()
    online.launch(us=50)
    offline.wait_stopped()
    offline.wait_running()


def test_offline_work_is_never_sent_away_to_run_by_a_daemon_that_comes_back_with_harvesting_off(node):
    """A process that valved does not know is one that it cannot stop: it is taken, held and ended."""
    offline, _ = settled(node)

    node.stop_valved(signal.SIGKILL)
    node.start_valved("--mode", "off")

    node.wait_for(lambda: offline.process.poll() is not None, "it was asked to leave")


def test_a_daemon_killed_while_offline_work_is_stopped_leaves_it_to_its_successor(node):
    offline, online = settled(node)
    online.launch(us=100)
    offline.wait_stopped()

    node.stop_valved(signal.SIGKILL)
    node.start_valved()

    offline.wait_running()
    end(offline, online)
    gone_without_trace(node)


def test_offline_work_that_is_alone_runs_on_when_the_daemon_dies(node):
    """No online service is registered: when the lease is over there is nobody to protect."""
    offline, online = settled(node)
    end(online)
    node.wait_for(lambda: len(node.status().clients) == 1, "the online service is forgotten")
    lease_ns = node.status().lease_ns
    offline.wait_running()

    node.stop_valved(signal.SIGKILL)

    dead_ns = time.monotonic_ns()
    node.wait_for(lambda: offline.last_beat_ns > dead_ns + 3 * lease_ns, "it beats long after the lease")


def test_a_daemon_that_ends_for_an_upgrade_hands_stopped_work_to_its_successor(node):
    offline, online = settled(node)
    online.launch(us=100)
    offline.wait_stopped()

    assert node.stop_valved(signal.SIGTERM) == 0
    online.launch(us=100)
    node.start_valved()

    offline.wait_running()
    end(offline, online)
    gone_without_trace(node)


def test_drain_leaves_no_channel_off_and_ends_the_daemon(node):
    offline, online = settled(node)
    online.launch(us=100)
    offline.wait_stopped()

    valve(node, "drain", "--stop")

    assert node.valved.wait(200) == 0
    assert offline.process.wait(200) in (-signal.SIGTERM, -signal.SIGKILL), "the latter where its channels were off"
    node.wait_for(lambda: nothing_left_off(node), "no channel is off")
    online.launch(us=100)
    assert nothing_left_off(node)


def test_the_brake_stops_offline_work_until_it_is_released(node):
    offline, online = settled(node)

    valve(node, "pause")
    offline.wait_stopped()
    online.launch(us=100)
    assert node.status().paused
    end(online)
    node.wait_for(lambda: len(node.status().clients) == 1, "the online service is forgotten")
    assert not nothing_left_off(node)

    valve(node, "resume")
    offline.wait_running()


def test_the_brake_as_a_file_needs_no_daemon_and_no_api(node):
    offline, _ = settled(node)

    (node.run_dir / "pause").write_text("the night shift\n")
    offline.wait_stopped()
    assert node.status().paused_by == "the night shift"
    (node.run_dir / "pause").unlink()

    offline.wait_running()


@pytest.mark.parametrize("status", ["0x1b", "0x57"])
def test_firmware_that_refuses_foreign_channels_is_answered_by_the_next_rung(make_node, status):
    node = make_node(gsp_foreign="deny", gsp_status=status)

    offline, online = settled(node)
    online.launch(us=100)
    offline.wait_stopped()

    assert node.status().gpus[0].reach == "channel-fd"
    offline.wait_running()


def test_a_gate_call_that_hangs_delays_no_online_launch(node):
    offline, online = settled(node)
    node.emulator.fault("on disable 1: hold")

    online.launch(us=50)
    node.emulator.wait_held()
    for _ in range(10):
        online.launch(us=50)
    stands = node.emulator.state().raw["held"]

    assert stands == 1, "eleven kernels were launched and done while the gate call stood"
    node.wait_for(lambda: node.status().counters.gate_failures > 0, "the failure is counted")
    node.emulator.release()
    offline.wait_running()
    end(offline, online)
    gone_without_trace(node)


def test_offline_work_launches_nothing_while_the_call_that_is_to_stop_it_hangs(make_node):
    """Its channels are on still, and it is not frozen here: that it reads the order to hold is all that stops it."""
    node = make_node(config="[ladder]\nfreeze = false")
    offline = Online(node, "batch", role="offline")
    offline.wait_ready()
    offline.launch(us=50)
    online = Online(node, "chat")
    online.wait_ready()
    node.wait_for(lambda: not service(node, "chat").busy, "the service lets go")
    offline.launch(us=50)
    node.emulator.fault("on disable 1: hold")
    online.hint(1)
    online.launch(us=50)
    node.wait_for(lambda: node.status().counters.gate_failures > 0, "its launches are to be held")

    offline.process.stdin.write("launch 50\n")
    offline.process.stdin.flush()
    for _ in range(100):
        online.launch(us=50)

    assert not select.select([offline.process.stdout], [], [], 0)[0], "it has launched"
    node.emulator.release()
    online.hint(0)
    assert offline._line(), "it goes on"


def test_a_gate_call_that_fails_once_is_made_again_channel_by_channel(node):
    offline, online = settled(node)
    node.emulator.fault("on disable 1: status 0x65")

    online.launch(us=100)

    offline.wait_stopped()
    offline.wait_running()
    end(offline, online)
    gone_without_trace(node)


def test_an_unknown_driver_is_watched_and_never_touched(make_node):
    node = make_node(driver="999.10")

    online = Online(node, "chat")
    online.wait_ready()
    for _ in range(5):
        online.launch(us=50)

    status = node.status()
    assert not status.driver.known
    assert not [gate for gate in node.emulator.state().gates if not gate.on]


def test_a_thousand_strangers_who_talk_nonsense_do_not_hurt_those_who_work(node):
    """Hostile peers on the link socket: garbage, half a header, a lying length, silence; then gone."""
    offline, online = settled(node)
    fds = node.valved_fds()
    junk = [
        b"",
        b"\0",
        b"VLNK",
        bytes(24),
        struct.pack("<IHHIIQ", 0x4B4E4C56, 1, 1, 4096, 1, 0),
        bytes(512),
        b"x" * 400,
    ]

    for number in range(1000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(str(node.run_dir / "link.sock"))  # blocks while the backlog is full
            payload = junk[number % len(junk)]
            if payload:
                with contextlib.suppress(BrokenPipeError):  # turned away unread: it comes too often
                    peer.send(payload)

    online.launch(us=100)
    offline.wait_stopped()
    offline.wait_running()
    node.wait_for(lambda: node.valved_fds() <= fds + 2, "no descriptor is leaked")
    assert len(node.status().clients) == 2
    assert node.status().counters.malformed > 0


def test_a_valved_whose_run_folder_was_removed_lets_go_and_leaves_its_successor_alone(node):
    offline, online = settled(node)
    online.launch(us=100)
    offline.wait_stopped()
    orphan = node.valved

    node.run_dir.rename(node.folder / "removed")
    node.run_dir.mkdir()
    node.start_valved()

    assert orphan.wait(200) == 1
    assert node.status().clients is not None  # its successor's sockets and state are untouched
    end(offline, online)
    gone_without_trace(node)
