"""Who keeps the pages of links that have ended: what valved pays for them is bounded, and nobody honest is refused."""

from __future__ import annotations

import contextlib
import fcntl
import struct
import termios

import pytest
from link_peers import PATIENCE_S, hear
from node_world import World, successor

from valved.abi.link import LinkType, Refusal, RefusedMessage, Schedule, build, parse
from valved.clients import connection, welcomes
from valved.clients.accounts import account_of
from valved.clients.connection import UNREAD_BYTES, UNREAD_LEAST
from valved.clients.identity import Peer
from valved.clients.welcomes import (
    BLIND,
    BLIND_LINKS,
    DAY_NS,
    KEPT,
    KEPT_BYTES,
    LINK_BYTES,
    LINK_NS,
    LINKS,
    LOOK_NS,
    Welcomes,
)
from valved.config import MIB, Config, QuotaTable
from valved.model.events import EventKind
from valved.model.ids import ProcessId, Role

PAGES = 8192  # what one link keeps
HELLO_MS = 25  # a tenant has a tenth of the loop: 40 a second
TENANT = f"/docker/{'a' * 64}"
ASK = build(LinkType.SCHEDULE_WAIT, Schedule(h_client=0, h_object=0), seq=1, sent_ns=0)
OTHER = f"/docker/{'b' * 64}"


class Keeper:
    """A process that keeps the pages of each link that it had, and says HELLO again."""

    def __init__(self, world, pid=200, home=TENANT):
        self.world, self.welcomes = world, 0
        self.pid = world.processes.add(pid, cgroup=home)

    def knock(self):
        """Whether it was welcomed."""
        connection = self.world.hello(self.pid)
        self.world.run(HELLO_MS)
        if connection.client is None:
            assert not connection.sent or self.world.refusal(connection) is Refusal.QUOTA
            return False
        self.world.register.leave(connection.client, "link closed")
        self.welcomes += 1
        self.world.kept_bytes += PAGES
        return True


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path, config=Config(quota=QuotaTable(clients_per_process=4096, clients_per_uid=4096)))
    world.kept_bytes = 0
    yield world
    world.check()


def use_up(world):
    keeper = Keeper(world)
    world.kept_bytes = KEPT_BYTES + 1
    while keeper.knock():
        assert keeper.welcomes <= LINKS + 2
    return keeper


def peer_of(pid=200, home=TENANT):
    process = ProcessId(pid=pid, start_time=1)
    return Peer(process=process, uid=1000, chain=(process,), cgroup=home, comm="job")


def test_who_keeps_the_pages_of_each_link_never_makes_valved_pay_for_more_than_the_bound(world, monkeypatch):
    most = 10 * MIB
    monkeypatch.setattr(welcomes, "KEPT_BYTES", most)  # less, as each HELLO here takes its time
    keeper = Keeper(world)

    for _ in range(2200):
        keeper.knock()

    late = LOOK_NS // (HELLO_MS * 1_000_000)  # between two looks
    assert most < world.kept_bytes <= most + 2 * late * PAGES


def test_many_tenants_that_keep_pages_never_have_more_than_their_counts(world):
    world.kept_bytes = KEPT_BYTES + 1
    keepers = [Keeper(world, 200 + at, f"/docker/{at:064x}") for at in range(3)]

    for _ in range(LINKS + 500):
        for keeper in keepers:
            keeper.knock()

    assert all(LINKS / 2 < keeper.welcomes < LINKS + 10 for keeper in keepers)


def test_accounts_without_end_that_keep_pages_never_have_more_than_the_bound_together(world, monkeypatch):
    """Of whoever may have users or pods at will: each makes one link."""
    few, most = PAGES * LINKS // 2, PAGES * LINKS
    monkeypatch.setattr(welcomes, "KEPT_BYTES", few)
    monkeypatch.setattr(welcomes, "KEPT_MOST", most)

    for at in range(3 * LINKS):
        Keeper(world, 200 + at, f"/docker/{at:064x}").knock()

    late = LOOK_NS // (HELLO_MS * 1_000_000)
    assert few < world.kept_bytes <= most + late * PAGES


def test_what_a_link_leaves_unread_counts_as_more_links(world):
    world.kept_bytes = KEPT_BYTES + 1
    bound, mine = world.register.admission.welcomes, peer_of().account
    for _ in range(LINKS // 2):
        bound.left_unread(mine, 2 * LINK_BYTES)
        assert not bound.why_not(peer_of(300, OTHER))

    assert bound.why_not(peer_of()) == KEPT


@pytest.mark.parametrize("kept", [KEPT_BYTES + 1, None])
def test_refusals_that_nobody_reads_are_never_sent_without_end(world, monkeypatch, kept):
    monkeypatch.setattr(welcomes, "REFUSAL_NS", DAY_NS // 16)
    world.kept_bytes = kept
    pid = world.processes.add(200, cgroup=TENANT)

    sent = sum(len(world.hello(pid, Role.ONLINE).sent) for _ in range(100))

    assert 16 <= sent <= 18


def test_who_is_refused_always_hears_of_it_while_nothing_is_kept(world):
    world.kept_bytes = 0
    bound, mine = world.register.admission.welcomes, peer_of().account

    assert all(bound.may_tell(mine) for _ in range(100_000))


def test_who_keeps_pages_never_uses_up_what_another_account_has(world):
    use_up(world)

    assert Keeper(world, 300, OTHER).knock()


def test_a_refusal_says_why_and_is_told_once_and_heals(world):
    keeper = use_up(world)
    assert not keeper.knock()
    told = [event for event in world.events(EventKind.REFUSED) if event.reason == KEPT]
    assert len(told) == 1

    world.kept_bytes = 0
    assert not keeper.knock(), "nobody has looked since"
    world.run(LOOK_NS / 1e6)
    keeper.knock()

    assert keeper.knock()


def test_an_honest_job_is_never_refused_for_what_nobody_keeps_any_more(world):
    """It has used up its count while nothing was kept. Then a tenant kept pages and ended, and hours passed."""
    kept = [0]
    bound = Welcomes(world.clock, world.worker, lambda: kept[0])
    for _ in range(2 * LINKS):
        bound.took(peer_of())
    kept[0] = KEPT_BYTES + 1
    assert bound.why_not(peer_of()) == KEPT

    world.worker.later = True  # as it is: a look is over after the judgement that asked for it
    kept[0] = 0
    for _ in range(3):
        world.run(LOOK_NS / 1e6)
        world.worker.finish()

    assert not bound.why_not(peer_of())


@pytest.mark.parametrize("text", [KEPT, BLIND])
def test_what_a_refused_process_is_told_is_never_cut(text):
    message = RefusedMessage(code=Refusal.QUOTA, text=text)

    assert parse(build(LinkType.REFUSED, message, seq=1, sent_ns=0)).body.text == text


def test_honest_short_jobs_are_never_refused_while_nothing_is_kept(world):
    """At 40 a second: forty times the count."""
    bound = Welcomes(world.clock, world.worker, lambda: 1 * MIB)
    job = peer_of()

    for at in range(100_000):
        assert not bound.why_not(job), f"job {at}"
        bound.took(job)
        world.run(HELLO_MS)


def test_who_was_served_beyond_its_count_never_pays_for_that_later(world):
    kept = [0]
    bound = Welcomes(world.clock, world.worker, lambda: kept[0])
    for _ in range(10 * LINKS):
        assert not bound.why_not(peer_of())
        bound.took(peer_of())
    kept[0] = KEPT_BYTES + 1
    world.run(LOOK_NS / 1e6)
    assert bound.why_not(peer_of()) == KEPT

    world.run(2 * DAY_NS / LINKS / 1e6)

    assert not bound.why_not(peer_of())


def test_an_online_service_is_never_refused_for_what_its_account_keeps(world):
    use_up(world)
    pid = world.processes.add(300, cgroup=TENANT)
    world.node.launch(pid, world.processes.start_time(pid), Role.ONLINE, "chat")

    for _ in range(50):
        client = world.hello(pid, Role.ONLINE).client
        hook = world.hello(pid, Role.HOOK).client
        assert client is not None
        assert hook is not None
        world.register.leave(hook, "link closed")
        world.register.leave(client, "link closed")


def test_a_service_never_uses_up_what_jobs_of_its_account_have(world):
    pid = world.processes.add(300, cgroup=TENANT)
    world.node.launch(pid, world.processes.start_time(pid), Role.ONLINE, "chat")
    world.kept_bytes = KEPT_BYTES + 1
    for _ in range(LINKS + 1):
        world.register.leave(world.hello(pid, Role.ONLINE).client, "link closed")

    assert Keeper(world).knock()


def test_who_comes_back_to_a_new_valved_is_never_refused_for_what_its_account_keeps(world):
    jobs = [world.processes.add(400 + at, cgroup=TENANT) for at in range(20)]
    for pid in jobs:
        assert world.hello(pid).client is not None
    second = successor(world, config=world.config)
    second.kept_bytes = 0
    use_up(second)

    assert all(second.hello(pid).client is not None for pid in jobs)
    assert second.hello(jobs[0]).client is None, "it comes back once"
    second.check()


def test_where_nothing_can_be_read_a_larger_count_refuses(world):
    bound = Welcomes(world.clock, world.worker, lambda: None)
    served = 0
    while served <= BLIND_LINKS and not bound.why_not(peer_of()):
        bound.took(peer_of())
        served += 1

    assert served == BLIND_LINKS
    assert bound.why_not(peer_of()) == BLIND
    assert not bound.why_not(peer_of(300, OTHER))


def test_a_moment_in_which_nothing_can_be_read_never_refuses_an_honest_job(world):
    """A command runs in valved's container, say: the larger count is used up long since."""
    kept: list[int | None] = [0]
    bound = Welcomes(world.clock, world.worker, lambda: kept[0])
    for _ in range(2 * BLIND_LINKS):
        assert not bound.why_not(peer_of())
        bound.took(peer_of())

    kept[0] = None
    world.run(LOOK_NS / 1e6)

    assert not bound.why_not(peer_of())


def test_nothing_is_read_while_no_account_has_used_half_of_its_count(world):
    looks = []
    bound = Welcomes(world.clock, world.worker, lambda: looks.append(1) or 0)
    for _ in range(LINKS // 2):
        bound.why_not(peer_of())
        bound.took(peer_of())
    assert not looks

    for _ in range(LINKS):
        bound.why_not(peer_of())
        bound.took(peer_of())

    assert len(looks) == 1


def test_a_look_that_takes_long_is_never_begun_twice(world):
    world.worker.later = True
    looks = []
    bound = Welcomes(world.clock, world.worker, lambda: looks.append(1) or 0)
    for _ in range(LINKS):
        bound.why_not(peer_of())
        bound.took(peer_of())
        world.run(LOOK_NS / 1e6)

    world.worker.finish()

    assert len(looks) == 1


def test_the_account_is_the_one_that_has_turns(world):
    """A pod's processes share one count, whatever users they become."""
    keeper = use_up(world)
    assert account_of(1, TENANT) == account_of(2, TENANT)

    assert world.hello(world.processes.add(900, cgroup=TENANT), uid=2).client is None
    assert not keeper.knock()


def unread(peer):
    """What lies in the socket of its client: valved pays for it."""
    return struct.unpack("i", fcntl.ioctl(peer._sock, termios.TIOCOUTQ, bytes(4)))[0]


def test_who_asks_and_never_reads_never_makes_valved_pay_for_more_than_32_kib(server):
    sock, *_ = server.welcome()
    [peer] = server.link._peers
    sock.setblocking(False)
    asked = 0
    for _ in range(200):
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(ASK)
                asked += 1
        assert server.call(lambda: unread(peer)) <= UNREAD_BYTES + 1024
    server.until(lambda: unread(peer) > UNREAD_BYTES)

    sock.settimeout(PATIENCE_S)
    for _ in range(asked):  # nothing is lost
        assert hear(sock)[0].type is LinkType.ACK


def test_thousands_of_links_that_never_read_never_make_valved_pay_for_32_kib_each(server, monkeypatch):
    """One container's root may have 3,584: 115 MB, in a container of 256 MiB."""
    monkeypatch.setattr(connection, "UNREAD_OF_ALL", 2 * UNREAD_LEAST)
    sock, *_ = server.welcome()
    [peer] = server.link._peers
    others = [server.welcome() for _ in range(3)]
    sock.setblocking(False)
    for _ in range(200):
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(ASK)
        assert server.call(lambda: unread(peer)) <= UNREAD_LEAST + 1024
    server.until(lambda: unread(peer) > UNREAD_LEAST)
    assert server.link.peers == 1 + len(others)


def test_what_lies_unread_as_a_link_ends_is_never_forgotten(server):
    sock, *_ = server.welcome()
    [peer] = server.link._peers
    for _ in range(30):
        sock.send(ASK)
    server.until(lambda: unread(peer) > 2 * LINK_BYTES)
    sock.send(b"this is no packet")
    server.until(lambda: not server.link._peers)

    taken_ns = server.world.register.admission.welcomes._made.taken_ns(peer.account, server.world.clock.now_ns())
    assert taken_ns > 2.9 * LINK_NS
