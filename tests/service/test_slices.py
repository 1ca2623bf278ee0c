"""The timeslice rung: who selects it, what it needs, and that it is refused by name."""

from __future__ import annotations

import pytest
from node_world import World

from valved.abi.link import Feature, LinkType
from valved.config import Config, GrantedTable, load_config
from valved.errors import ConfigError
from valved.gate.slices import Slices
from valved.machine.ports import Grants
from valved.model.ids import Role
from valved.model.rungs import SliceSettings

DRIVER = "580.159.04"
SLICED = GrantedTable(slo="tpot=40ms", grant="true", rung="timeslice", probed_driver=DRIVER, slice_us=300)


def here(tmp_path, table: GrantedTable = SLICED) -> World:
    world = World(tmp_path, config=Config(granted=table))
    world.hook(world.online(700, gpus=(0,)))
    return world


def offline(world: World, pid: int, *, gpu: int = 0) -> int:
    world.processes.add(pid)
    world.node.launch(pid, world.processes.start_time(pid), Role.OFFLINE, f"batch{pid}")
    client = world.hello(pid, features=Feature.GAPS | Feature.GRANT).client
    world.add_channel(client, gpu=gpu, h_client=0xC1D00000 + client)
    return client


def words(world: World) -> str:
    return next(one for one in world.node.status().services if one.role is Role.ONLINE).granted.words


def test_it_is_off_unless_somebody_selects_it(tmp_path):
    world = here(tmp_path, GrantedTable(slo="tpot=40ms", grant="true"))
    offline(world, 710)

    assert world.gate.granting.sliceable == (False, frozenset())
    assert not world.gate.granting.shortened
    assert not world.register.channels.keeps_files
    assert "slice" not in words(world)


def test_each_group_gets_its_short_slice_once_and_before_its_channel_is_answered(tmp_path):
    world = here(tmp_path)

    client = offline(world, 710)
    offline(world, 711, gpu=1)

    shortened = world.gate.granting.shortened
    assert [(one[0], one[3]) for one in shortened] == [(client, 300), (client + 1, 300)]
    assert world.gate.granting.sliceable == (True, {0, 1})
    world.granting.refresh()
    assert len(shortened) == 2
    assert world.register.channels.keeps_files


@pytest.mark.parametrize("probed", ["", "570.1"])
def test_it_is_refused_by_name_with_a_driver_that_nobody_has_probed(tmp_path, probed):
    """The gate rung goes on in its place."""
    world = here(tmp_path, GrantedTable(slo="tpot=40ms", grant="true", rung="timeslice", probed_driver=probed))
    offline(world, 710)

    assert world.gate.granting.sliceable == (False, frozenset())
    assert not world.gate.granting.shortened
    assert "timeslice refused: granted.probed_driver names " in words(world)
    assert DRIVER in words(world)


def test_a_gpu_where_the_driver_refuses_the_slice_is_never_shared(tmp_path):
    world = here(tmp_path)
    world.gate.granting.slice_refusal = "RM status 0x1b"

    offline(world, 710)

    assert world.gate.granting.sliceable == (True, {1})
    assert words(world).endswith("no short time slice on GPU 0: process 710: RM status 0x1b")


def test_a_process_whose_file_comes_late_is_shortened_then(tmp_path):
    world = here(tmp_path)
    world.processes.add(710)
    fileless = world.gate.granting.fileless = set(range(100))
    client = offline(world, 710)
    assert world.gate.granting.sliceable == (True, {1})
    assert "has not passed its driver file" in words(world)

    fileless.discard(client)
    world.granting.refresh()

    assert world.gate.granting.sliceable == (True, {0, 1})


def test_a_group_that_is_made_anew_under_an_old_handle_never_passes_for_a_short_one(tmp_path):
    world = here(tmp_path)
    client = offline(world, 710)
    again = world.channel(gpu=0, h_client=0xC1D00000 + client, h_channel=0xCAF00001)
    world.register.handle(client, world.packet(LinkType.CHANNEL_DEL, again), [])
    world.add_channel(client, gpu=0, h_client=0xC1D00000 + client)

    assert len(world.gate.granting.shortened) == 2


def test_a_group_beside_others_that_is_made_anew_never_passes_for_a_short_one(tmp_path):
    """Its GPU is the process's all the while."""
    world = here(tmp_path)
    client = offline(world, 710)
    root = 0xC1D00000 + client
    world.add_channel(client, gpu=0, h_client=root, h_channel=0xCAF00002, h_tsg=0xCAF10000)
    gone = world.channel(gpu=0, h_client=root, h_channel=0xCAF00002, h_tsg=0xCAF10000)
    world.register.handle(client, world.packet(LinkType.CHANNEL_DEL, gone), [])
    world.add_channel(client, gpu=0, h_client=root, h_channel=0xCAF00002, h_tsg=0xCAF10000)

    assert [one[2] for one in world.gate.granting.shortened] == [0xCAF00000, 0xCAF10000, 0xCAF10000]


def test_a_channel_that_comes_never_has_those_of_others_looked_at(tmp_path, monkeypatch):
    world = here(tmp_path)
    for pid in range(710, 716):
        offline(world, pid)
    client = offline(world, 720)
    looks = []
    monkeypatch.setattr(Slices, "_shorten", lambda slices, *which: looks.append(which) or "")

    world.add_channel(client, gpu=0, h_client=0xC1D00000 + client, h_channel=0xCAF00002)

    assert [each for each, _ in looks] == [client]


def test_a_channel_whose_group_cannot_be_shortened_bars_its_gpu_before_it_is_answered(tmp_path):
    world = here(tmp_path)
    client = offline(world, 710)
    assert world.gate.granting.sliceable == (True, {0, 1})
    world.gate.granting.slice_refusal = "RM status 0x1b"

    world.add_channel(client, gpu=0, h_client=0xC1D00000 + client, h_channel=0xCAF00002, h_tsg=0xCAF10000)

    assert world.gate.granting.sliceable == (True, {1})


def test_a_refusal_that_has_passed_never_bars_a_gpu_any_longer(tmp_path):
    world = here(tmp_path)
    world.gate.granting.slice_refusal = "ETIMEDOUT"
    offline(world, 710)
    world.gate.granting.slice_refusal = ""
    world.granting.refresh()

    assert world.gate.granting.sliceable == (True, {0, 1})


def test_a_process_that_ends_bars_nobody_any_longer(tmp_path):
    world = here(tmp_path)
    world.gate.granting.slice_refusal = "RM status 0x1b"
    client = offline(world, 710)

    world.register.leave(client, "exit")
    world.granting.refresh()

    assert world.gate.granting.sliceable == (True, {0, 1})


@pytest.mark.parametrize("line", ['rung = "fast"', "slice_us = 5", "slice_us = 20000"])
def test_a_rung_without_sense_stops_the_start(tmp_path, line):
    path = tmp_path / "valve.toml"
    path.write_text(f"[granted]\n{line}\n")

    with pytest.raises(ConfigError, match="granted"):
        load_config(path, {})


def test_the_gate_rung_needs_no_probe():
    assert SliceSettings().refusal(DRIVER) == ""


def test_what_was_shared_in_slices_is_not_called_a_pause(tmp_path):
    world = here(tmp_path)
    (service,) = world.gating.online
    world.gate.granting.given[service] = Grants(grants=2, granted_ns=3_000_000_000)

    assert words(world).endswith("; 2 times shared for 3 s in all, 0 broken by a launch")
