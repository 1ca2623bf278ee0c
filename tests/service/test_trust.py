"""Memory never crosses from one trust domain to another: who made a handle may have kept a mapping of it."""

from __future__ import annotations

import numpy as np
import pytest
from lent_fds import lend
from memory_world import KvWorld
from valve_kube import names

from valved.abi.kv_link import ENTRY, KvDone, KvEntries
from valved.abi.link import LinkType, Malformed
from valved.clients.identity import Peer, trust_domain
from valved.config import Config, MemoryTable
from valved.kube.pods import PodBook
from valved.kv.pool import Place
from valved.model.ids import ProcessId, Remap, Role
from valved.state.registry import ServiceEntry

MEMORY = {"handle_mib": 2, "headroom_min_mib": 2, "headroom_max_mib": 8, "tau_s": 1.0, "tau_min_s": 0.2}
WAYS = [Remap.COOPERATIVE, Remap.SPARSE, Remap.HELPER]


def world_of(tmp_path, **more):
    return KvWorld(tmp_path, config=Config(memory=MemoryTable(**MEMORY, **more)), handles=20)


def both(world, online_uid):
    offline = world.engine("offline", columns=16, uid=1000)
    offline.shim.has_stepped = False
    world.run(500)
    offline.shim.has_stepped = offline.shim.steps = True
    offline.book["steps"] = 7
    online = world.engine("online", columns=16, uid=online_uid)
    world.gate.finish(online.shim.client)
    world.run(2000)
    return offline, online


@pytest.mark.parametrize("remap", WAYS)
def test_a_handle_never_reaches_another_users_process(tmp_path, remap):
    """The card of this world asserts it for every mapping."""
    world = world_of(tmp_path, remap=remap)
    offline, online = both(world, 2000)

    online.want(used=4, wanted=32)
    world.run(500)

    assert len(online.backed()) >= 32
    assert len(offline.backed()) < 64
    assert world.kv.log.counters.remade_handles > 0
    online.want(used=4)
    for _ in range(10):  # the reserve gives in several steps, each a target of its own
        world.run(1500)
        online.obey_target()
    world.run(1500)
    assert len(offline.backed()) >= 48  # and back again
    world.check()


def test_memory_within_one_domain_is_never_made_anew(tmp_path):
    world = world_of(tmp_path, remap=Remap.HELPER)
    _, online = both(world, 1000)

    online.want(used=4, wanted=32)
    world.run(500)

    assert len(online.backed()) >= 32
    assert world.kv.log.counters.remade_handles == 0
    world.check()


def test_an_operator_may_say_that_all_trust_each_other(tmp_path):
    world = world_of(tmp_path, remap=Remap.HELPER, one_domain=True)
    for shim in world.shims:
        shim.entry.domain = ""
    offline = world.engine("offline", columns=16)
    world.run(500)

    assert {book.domain for book in world.kv.books.pool.ranges.values()} == {""}
    offline.shim.die()


def test_a_process_that_comes_back_in_another_domain_never_has_its_handles_in_the_books_twice(tmp_path):
    """The label of its namespace has changed under it. Booked twice, each would be freed twice at its end."""
    world = world_of(tmp_path, remap=Remap.HELPER)
    shim = world.engine("offline", columns=16).shim
    world.run(500)
    pool = world.kv.books.pool
    total = pool.total
    shim.hang_up()
    world.run(10)
    client = world.offline(pid=shim.entry.process.pid, gpus=(0,))
    world.books.clients[client].domain = "label other"

    shim.retell(client)
    world.run(100)

    assert pool.count_in(Place.ORPHAN, 0) == pool.total == total
    assert world.gating.counters.refusals["kv-held"]
    shim.die()
    world.run(3000)
    assert pool.free_handles(0) == pool.total <= total
    pool.check_integrity()


def test_a_handle_is_never_given_out_once_the_pool_is_closed(tmp_path):
    """Its descriptor is closed: by then that number may be another file, of whoever."""
    world = world_of(tmp_path)
    both(world, 1000)
    pool = world.kv.books.pool
    for process in [world.books.clients[shim.client].process for shim in world.shims]:
        pool.strand(pool.take(0, "uid 1000", 1), process, is_alive=True)
    assert pool.total

    pool.close()

    assert (pool.total, pool.free_handles(0), pool.count(0)) == (0, 0, 0)
    assert not any(pool.process_gone(world.books.clients[shim.client].process) for shim in world.shims)
    assert not any(len(pool.take(0, domain, 10)) for domain in list(pool._domains))


def test_names_that_another_tenant_says_never_keep_a_process_from_what_it_holds(tmp_path):
    """Names are counted up, so those to come can be guessed. A range that is not told whole stays unused."""
    world = world_of(tmp_path, remap=Remap.HELPER)
    pool = world.kv.books.pool
    thief = world.shim("offline", uid=2000)
    thief.reserve(0, 4, held=4)
    names = pool._next_name + np.arange(4)
    raw = np.array([(name, slot, 0) for slot, name in enumerate(names)], ENTRY).tobytes()
    thief.say(LinkType.KV_HELD, KvEntries(order=0, range=0, op=0, how=0, raw=raw), [lend() for _ in names])
    shim = world.engine("online", columns=8).shim
    world.run(500)
    held = {name for name, _ in shim.ranges[0].values()}
    assert held.intersection(names.tolist())
    shim.hang_up()
    world.run(10)

    shim.retell(world.online(pid=shim.entry.process.pid, gpus=(0,)))
    world.run(100)

    assert pool.mapped(0, (shim.client,)) == len(held)
    assert not world.kv.books.untold
    pool.check_integrity()


def test_a_descriptor_that_is_no_memory_of_the_driver_never_enters_the_pool(tmp_path):
    world = world_of(tmp_path, remap=Remap.HELPER)
    shim = world.shim("online")
    shim.answers = False
    shim.reserve(0, 4)
    [(_, order, _)] = shim.held_back
    junk = [lend() for _ in range(4)]
    world.outside.junk = {junk[2]}

    with pytest.raises(Malformed, match="not memory of the driver"):
        shim.say(LinkType.KV_DONE, KvDone(order=order.order, done=4, status=0, cu_result=0), junk)
    with pytest.raises(Malformed, match="not memory of the driver"):
        shim.say(LinkType.KV_HELD, KvEntries(order=0, range=0, op=0, how=0, raw=order.raw), junk)

    assert world.kv.books.pool.total == 0
    shim.die()
    world.run(10)


def peer(uid, cgroup="/pods/x"):
    process = ProcessId(pid=7, start_time=8)
    return Peer(process=process, uid=uid, chain=(process,), cgroup=cgroup, comm="work")


def service(name, root):
    return ServiceEntry(id=5, name=name, role=Role.OFFLINE, root=ProcessId(pid=7, start_time=8) if root else None)


def test_two_users_or_two_namespaces_are_never_one_domain():
    claimed = ["prod/chat-0", "batch/job-0"]
    assert trust_domain(peer(1), service("a", True), None) == "user 1"
    assert trust_domain(peer(2), service("a", True), None) == "user 2"
    found = [trust_domain(peer(0), service(name, True), PodBook()) for name in claimed]
    assert found == ["namespace prod", "namespace batch"]


def test_a_process_never_names_itself_into_a_namespace():
    """An unclaimed process's service has the name that the process gave itself."""
    assert trust_domain(peer(0), service("prod/chat-0", False), labelled("prod")) == "group /pods/x"


def labelled(*namespaces, value="research"):
    pods = PodBook()
    pods.replace_namespaces([{"metadata": {"name": name, "labels": {names.TRUST: value}}} for name in namespaces])
    return pods


def test_namespaces_without_one_label_never_share_memory():
    pods = labelled("prod", "batch")
    services = [service(f"{namespace}/pod-0", True) for namespace in ("prod", "batch", "guest", "research")]

    found = [trust_domain(peer(0), one, pods) for one in services]

    assert found == ["label research", "label research", "namespace guest", "namespace research"]


def test_a_label_that_was_taken_off_never_counts_for_who_joins_later():
    pods = labelled("prod", "batch", "guest")
    pods.drop_namespace({"metadata": {"name": "batch"}})
    pods.put_namespace({"metadata": {"name": "guest", "labels": {}}})

    found = [trust_domain(peer(0), service(f"{one}/pod-0", True), pods) for one in ("prod", "batch", "guest")]

    assert found == ["label research", "namespace batch", "namespace guest"]
