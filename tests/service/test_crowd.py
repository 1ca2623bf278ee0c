"""The books of a full node: 100 online and 64 offline processes of 64 channels each on eight GPUs."""

from __future__ import annotations

import random

import pytest
from node_world import World

ONLINE, OFFLINE, CHANNELS, GPUS = 100, 64, 64, 8


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path, gpus=GPUS)
    offline = [world.offline(pid=1000 + n, gpus=()) for n in range(OFFLINE)]
    for number, client in enumerate(offline):
        for channel in range(CHANNELS):
            world.add_channel(client, gpu=number % GPUS, h_client=client, h_channel=channel + 1)
    for number in range(ONLINE):
        world.online(pid=2000 + number, name=f"s{number}", gpus=(number % GPUS,))
    return world


def test_a_full_node_balances_and_goes_to_sleep(world):
    world.run(200)

    world.check()
    assert [account.channels for account in world.gating.gpus.values()] == [OFFLINE // GPUS * CHANNELS] * GPUS
    assert not world.gate.off
    assert world.clock.waiting <= 1  # the state file, nothing else


def test_books_balance_through_a_storm_of_launches_and_deaths(world):
    chance = random.Random(5)
    world.run(200)
    online = [c for c, entry in world.books.clients.items() if entry.process.pid >= 2000]
    for _ in range(300):
        client = chance.choice(online)
        if client in world.books.clients:
            world.work(client, ms=chance.choice([0, 1, 5]))
        if chance.random() < 0.1:
            victim = chance.choice(list(world.books.clients.values()))
            world.processes.end(victim.process.pid)
        world.run(chance.choice([0, 1, 30]))
    world.beat_all()
    world.run(1000)

    world.check()
    for client in [entry.process.pid for entry in world.books.clients.values()]:
        world.processes.end(client)
    assert not world.books.clients
    assert not world.books.services
    assert not world.gating.online
    assert not world.gate.off
    assert all(account.channels == 0 and not account.holders for account in world.gating.gpus.values())
