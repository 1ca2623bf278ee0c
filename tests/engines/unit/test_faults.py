"""Whatever fails, the engine goes on: no daemon, another daemon, a daemon that dies, a hook that raises."""

from __future__ import annotations

import dataclasses
import errno
import socket
import struct
import threading
from types import SimpleNamespace

import pytest
from kv_node import KvNode, restart, wait_for
from toy_engine import ToyScheduler
from toy_world import Reclaimer, close, hooked, prompts, run
from valve_hook import Refused
from valve_hook import link as link_module
from valve_hook.link import Attach, BlockLayout, Link, Tensor, socket_path
from valve_hook.vllm import calls, check
from valve_hook.wire import Mode

WANTED = Attach(engine="toy 1", mode=Mode.FULL, blocks=40, block_tokens=4, rows=8, row_blocks=16, ranks=1)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Only an offline engine's cache may lack memory, so only it waits for a table."""
    monkeypatch.setenv("VALVE_ROLE", "offline")


def test_without_a_daemon_nothing_is_hooked(tmp_path, monkeypatch):
    monkeypatch.delenv("VALVE_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if socket_path() is not None:
        pytest.skip("a valved runs on this machine")
    scheduler = ToyScheduler(hooks=calls)

    done = run(scheduler, prompts(1, 6), depth=2)

    assert scheduler._valve is None
    assert run(ToyScheduler(), prompts(1, 6), depth=2) == done


def test_a_daemon_that_is_not_there_yet_is_found_later(tmp_path):
    node = KvNode(tmp_path)
    node.stop()
    scheduler = hooked(node, blocks=60)
    assert scheduler._valve.reconciler.session is None
    node.start()
    wait_for(lambda: scheduler._valve.link.session, "attached")
    run(scheduler, prompts(1, 4), depth=1)

    assert node.book()["steps"] > 0
    close(scheduler)
    node.stop()


def test_a_refusal_names_both_versions(node, link):
    node.refuse = struct.pack("<IHH96s", 1, 7, 9, b"too old")
    link.close()
    refused = Link(build="test", path=node.path, retry_s=0.02)
    refused.start()
    wait_for(lambda: refused.said, "an answer")

    assert "too old; valved speaks abi 7 to 9, this hook 1" in refused.said
    assert refused.attach(WANTED, 0.1) is None
    refused.close()


@pytest.mark.parametrize("what", ["kv_abi", "table", "status", "fewer blocks", "more blocks"])
def test_a_table_of_another_kind_is_not_attached_to(node, link, what):
    node.kv_abi = 2 if what == "kv_abi" else 1
    node.break_table = what == "table"
    node.attach_status = 22 if what == "status" else 0
    node.blocks_told = {"fewer blocks": 30, "more blocks": 90}.get(what, 0)

    assert link.attach(WANTED, 1.0) is None
    wait_for(lambda: link.said, "the reason")


def test_a_refused_layout_is_said_once_and_requests_are_counted_on(node, link, caplog):
    """It is told again when there is another one, not every two seconds."""
    node.layout_status = 22
    first, second = (
        BlockLayout(blocks=60, block_tokens=4, tensors=[Tensor(base=at, block_stride=8, block_bytes=8)])
        for at in (1, 2)
    )
    link.register_layout(first)
    assert link.attach(WANTED, 1.0) is None
    wait_for(lambda: link._told == (link.layout, link.wanted), "both are told")  # attach gives up after its time
    told = len(node.layouts)  # twice, where the thread looked between the layout and the wish
    link.register_layout(first)
    for _ in range(3):
        seen = node.region()["hint_ns"]
        wait_for(lambda seen=seen: node.region()["hint_ns"] > seen, "renewed")
    assert told in (1, 2)
    assert (len(node.layouts), len(node.hellos), caplog.text.count("was refused")) == (told, 1, 1)

    node.layout_status = 0
    link.register_layout(second)
    wait_for(lambda: link.session is not None, "attached")


def test_no_engine_for_which_there_was_no_room_stays_without_a_table_for_good(node, link, monkeypatch):
    """It was told so once, and never asked again."""
    monkeypatch.setattr(link_module, "AGAIN_S", 0.0)
    node.attach_status = errno.EDQUOT
    assert link.attach(WANTED, 0.0) is None
    wait_for(lambda: "KV_ATTACH was refused" in link.said, "the reason")

    node.attach_status = 0

    wait_for(lambda: link.session is not None, "attached")


def test_the_first_step_waits_for_a_daemon_that_is_being_started_again(node, link):
    """Its predecessor has left the cache without memory: a step would compute from nothing."""
    node.stop()
    wait_for(lambda: "refused" in link.said, "nobody answers")
    start = threading.Timer(0.2, node.start)
    start.start()

    assert link.attach(WANTED, 0.0) is not None
    start.join()


def test_the_first_step_waits_while_valved_does_not_know_what_has_memory(node, link):
    """A worker's hook may be slower than the scheduler's: until it has told its layout there is no table."""
    node.attach_status = errno.EAGAIN
    told = threading.Timer(0.3, setattr, (node, "attach_status", 0))
    told.start()

    assert link.attach(WANTED, 0.0) is not None
    told.join()


def test_a_daemon_that_never_comes_back_does_not_hold_an_engine_for_ever(tmp_path):
    alone = Link(build="test", path=tmp_path / "link.sock", gone_s=0.0)
    alone.start()

    assert alone.attach(WANTED, 0.05) is None
    alone.close()


FOR_EVER_S = 1e6  # whoever waits for this never comes back
LEFT = {  # of a link whose socket was left by a dead daemon
    "no preload": {"is_preloaded": False, "ranges": lambda: None},
    "a preload without memory of Valve's": {"is_preloaded": True, "ranges": lambda: 0},
}


@pytest.fixture
def stale(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(tmp_path / "link.sock"))
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))
    return tmp_path / "link.sock"


@pytest.mark.parametrize("left", LEFT)
def test_a_socket_that_a_dead_daemon_left_is_not_waited_for(stale, left):
    """Nothing of this engine can be valved's memory: its first request need not wait, not even for a second."""
    ours = Link(build="test", path=stale, gone_s=FOR_EVER_S, **LEFT[left])
    ours.start()

    assert ours.attach(WANTED, FOR_EVER_S) is None
    assert "refused" in ours.said
    ours.close()


def test_where_the_dead_daemon_may_have_backed_the_cache_its_successor_is_waited_for(stale):
    """Each for as long as the doubt is worth: memory of Valve's here, a shim that cannot say, ranks elsewhere."""
    waits = []
    for ranges, ranks in ((1, 1), (None, 1), (0, 2)):
        ours = Link(build="test", path=stale, ranges=lambda ranges=ranges: ranges)
        ours._answered = SimpleNamespace(wait=waits.append, clear=lambda: None)

        assert ours.attach(dataclasses.replace(WANTED, ranks=ranks), 1.0) is None

    assert waits == [1.0, link_module.GONE_S, 1.0, link_module.GONE_S, 1.0, link_module.UNMET_S]


def test_the_batch_of_valve_run_waits_for_the_daemon_that_its_launcher_met(stale, monkeypatch):
    monkeypatch.setattr(link_module, "_links", {})
    monkeypatch.setenv("VALVE_ROLE", "offline")
    ours = link_module.process_link()
    ours.close()

    assert (ours.gone_s, ours.unmet_s) == (link_module.OFFLINE_GONE_S, link_module.OFFLINE_GONE_S)


def test_a_daemon_that_manages_no_memory_still_hears_of_requests(tmp_path):
    node = KvNode(tmp_path, features=2)
    scheduler = hooked(node, blocks=60)
    run(scheduler, prompts(1, 4), depth=1)
    scheduler.schedule()

    assert node.attached == ()
    assert node.region()["open"] == 0
    assert node.region()["ended"] == 4
    assert node.region()["useful"] == sum(tokens for _, _, tokens in prompts(1, 4))
    close(scheduler)
    node.stop()


def test_open_requests_are_exact_at_every_step(node):
    scheduler = hooked(node, blocks=60)
    for number in range(3):
        scheduler.add(f"r{number}", range(5), 3)
    seen = []
    while scheduler.requests or scheduler.finished_req_ids:
        scheduler.launch()
        seen.append(node.region()["open"])
        scheduler.believe()

    assert seen[0] == 3
    assert seen[-1] == 0
    assert node.region()["started"] == node.region()["ended"] == 3
    close(scheduler)


def test_a_layout_is_told_again_to_a_new_daemon(node, link):
    tensors = [Tensor(base=number << 20, block_stride=64, block_bytes=64, repeats=[(4, 1024)]) for number in range(20)]
    link.register_layout(BlockLayout(blocks=40, block_tokens=4, tensors=tensors))
    wait_for(lambda: len(node.layouts) == 2, "both packets")
    node.stop()
    node.start()
    wait_for(lambda: len(node.layouts) == 4, "both again")
    blocks, block_tokens, total, first, count, pinned = struct.unpack_from("<IIIIII", node.layouts[1])

    assert (blocks, block_tokens, total, first, count, pinned) == (40, 4, 20, 16, 4, 1)
    assert struct.unpack_from("<QQQQQ", node.layouts[1], 56) == (16 << 20, 64, 64, 4, 1024)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_daemon_restarts_again_and_again_in_the_middle_of_generation(node, depth):
    """Blocks without memory stay withheld meanwhile; the new table is taken up; each request ends once, and right."""
    work = prompts(5, 24)
    scheduler = hooked(node, blocks=60)
    reclaimer = Reclaimer(node, scheduler, 5)

    def restart(step):
        if step % 40 == 20:
            node.stop()
        if step % 40 == 30:
            before = scheduler._valve.link.session
            node.start()
            wait_for(lambda: scheduler._valve.link.session is not before and node.attached, "attached again")

    done = run(scheduler, work, depth=depth, reclaim=reclaimer, between=restart)

    assert scheduler._valve.link.connections > 1
    assert run(ToyScheduler(blocks=400), work, depth=depth) == done
    close(scheduler)


def test_the_last_word_of_a_daemon_that_died_is_acted_on(node):
    """It told a loss, carried it out and died; the memory is back, and zero, before the engine looks again."""
    work = prompts(5, 24)
    scheduler = hooked(node, blocks=60)

    def rob_and_restart(step):
        if step % 30 == 20:
            before = scheduler._valve.link.session
            lost = list(range(1, 50))
            scheduler.poison(lost)
            node.take(lost)
            node.stop()
            node.entries = node.entries | 1
            scheduler.back(lost)
            node.start()
            wait_for(lambda: scheduler._valve.link.session is not before and node.attached, "attached again")

    done = run(scheduler, work, depth=2, between=rob_and_restart)

    assert scheduler._valve.link.connections > 1
    assert run(ToyScheduler(blocks=400), work, depth=2) == done
    close(scheduler)


def test_a_loss_before_the_first_step_is_acted_on_in_it(node):
    """The engine is starting: it has attached, requests wait, nothing has run."""
    work = prompts(4, 12)
    scheduler = hooked(node, blocks=60)
    lost = list(range(1, 40))
    scheduler.poison(lost)
    node.take(lost)
    scheduler.launch()
    withheld = set(scheduler._valve.engine.withheld)
    scheduler.believe()
    scheduler.back(lost)
    node.give(lost)

    assert withheld == set(lost)
    assert run(scheduler, work, depth=2) == run(ToyScheduler(), work, depth=2)
    close(scheduler)


def test_a_loss_while_the_engine_stops_is_acted_on_and_no_error(node):
    """Its connection is closed; the steps that it still takes read the table all the same."""
    work = prompts(4, 12)
    scheduler = hooked(node, blocks=60)

    def stop_then_lose(step):
        if step == 6:
            close(scheduler)
        elif step in (8, 12):
            scheduler.poison(range(1, 30))
            node.take(list(range(1, 30)))
            scheduler.back(range(1, 30))
            node.give(list(range(1, 30)))

    done = run(scheduler, work, depth=2, between=stop_then_lose)

    assert done == run(ToyScheduler(), work, depth=2)
    assert node.book()["hit_requests"] > 0
    assert node.book()["failures"] == 0


@pytest.mark.parametrize("resets", [False, True], ids=["paused", "cache emptied"])
def test_an_engine_that_sleeps_with_open_requests_acts_on_its_losses_when_it_wakes(node, resets):
    """It takes no step meanwhile, so nobody looks; some sleepers empty their prefix cache."""
    work = prompts(4, 12)
    scheduler = hooked(node, blocks=60)

    def sleep(step):
        if step != 9:
            return
        while scheduler.in_flight:
            scheduler.believe()
        seen = node.book()["epoch_seen"]
        for first in (1, 20):
            lost = list(range(first, first + 25))
            scheduler.poison(lost)
            node.take(lost)
            scheduler.back(lost)
            node.give(lost)
        if resets:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        assert node.book()["epoch_seen"] == seen

    done = run(scheduler, work, depth=2, between=sleep)

    assert done == run(ToyScheduler(), work, depth=2)
    assert node.book()["epoch_seen"] == node.epoch
    assert node.book()["failures"] == 0
    close(scheduler)


def test_a_look_at_an_idle_engine_that_raises_does_not_end_the_connection(node, link):
    looks = []
    link.on_tick = lambda: looks.append(1) or 1 // 0
    wait_for(lambda: len(looks) > 2, "it is tried again")

    assert link.attach(WANTED, 0.0) is not None


def test_a_hook_that_raises_is_counted_and_the_engine_goes_on(node):
    """First failure: the coarse way. Second: Valve lets go, and says so in the book."""
    work = prompts(2, 12)
    scheduler = hooked(node, blocks=60)
    scheduler._valve.ledger.__class__.holders, holders = None, scheduler._valve.ledger.__class__.holders
    try:
        done = run(scheduler, work, depth=2, reclaim=lambda step: step in (3, 5) and node.take([1, 2, 3]))
    finally:
        scheduler._valve.ledger.__class__.holders = holders

    assert run(ToyScheduler(), work, depth=2) == done
    assert node.book()["failures"] == 1
    assert node.book()["mode"] == Mode.COARSE

    def broken(*_):
        raise RuntimeError("on purpose")

    scheduler._valve.engine.reset = broken
    scheduler.add("z", range(6), 8)
    scheduler.launch(lambda: node.take([4]))
    scheduler.believe()
    run(scheduler, [], depth=1)

    assert scheduler.failed == {"z"}
    assert node.book()["mode"] == Mode.NONE
    close(scheduler)


@pytest.mark.parametrize("comes_back", [False, True], ids=["for good", "and comes back"])
def test_a_loss_that_was_told_before_valved_let_go_is_never_believed(node, comes_back):
    """The link breaks between the word and the engine's next look; the shim has carried it out by then. Where valved
    comes back it has backed the blocks again, and its new table does not tell of it.
    """
    work = prompts(5, 24)
    scheduler = hooked(node, blocks=60)

    def lose_and_let_go(step):
        if step != 20:
            return
        lost = list(range(1, 40))
        scheduler.poison(lost)
        node.take(lost)
        node.detach()
        if comes_back:
            before = scheduler._valve.link.session
            node.stop()
            node.entries = node.entries | 1
            scheduler.back(lost)
            node.start()
            wait_for(lambda: scheduler._valve.link.session is not before and node.attached, "attached again")

    done = run(scheduler, work, depth=2, between=lose_and_let_go)

    assert run(ToyScheduler(blocks=400), work, depth=2) == done
    assert scheduler._valve.reconciler.receipts.hit_requests > 0
    assert scheduler._valve.engine.withheld == (set() if comes_back else set(range(1, 40)))
    close(scheduler)


def test_a_detached_table_asks_for_nothing_and_is_asked_for_nothing(node):
    scheduler = hooked(node, blocks=60)
    scheduler.schedule()
    node.detach()  # first: the link's thread may look between the two
    node.aim(20)
    for _ in range(3):
        scheduler.schedule()

    assert node.offered() == []
    assert node.needs == []
    close(scheduler)


def test_a_loss_told_in_a_session_that_nobody_looked_at_is_never_believed(node):
    """Two daemons come and go while the engine takes no step. The first takes memory and gives it back."""
    work = prompts(5, 24)
    scheduler = hooked(node, blocks=60)

    def two_restarts(step):
        if step == 20:
            restart(node, scheduler)
            lost = list(range(1, 50))
            scheduler.poison(lost)
            node.take(lost)
            scheduler.back(lost)
            node.give(lost)
            restart(node, scheduler)

    done = run(scheduler, work, depth=2, between=two_restarts)

    assert run(ToyScheduler(blocks=400), work, depth=2) == done
    assert scheduler._valve.reconciler.receipts.hit_requests > 0
    close(scheduler)


def test_a_loss_with_no_requests_at_all_only_withholds(node):
    scheduler = hooked(node, blocks=60)
    scheduler.schedule()
    node.take(list(range(1, 50)))
    scheduler.schedule()

    assert scheduler._valve.engine.withheld == set(range(1, 50))
    assert node.book()["epoch_seen"] == node.epoch
    scheduler.check_integrity(range(1, 50))
    close(scheduler)


def test_capacity_below_the_need_of_one_request_makes_it_wait_and_not_fail(node):
    """The engine lives, others that fit go on, and what it wants is said to valved."""
    scheduler = hooked(node, blocks=60)
    scheduler.schedule()
    lost = list(range(5, 60))
    scheduler.poison(lost)
    node.take(lost)
    scheduler.add("long", range(40), 4)
    for _ in range(8):
        scheduler.launch()
        scheduler.believe()

    assert scheduler.requests["long"].output == []
    assert node.book()["wanted"] >= 10
    wait_for(lambda: node.needs, "valved is asked")

    scheduler.back(lost)
    node.give(lost)

    assert len(run(scheduler, [], depth=1)["long"]) == 4
    close(scheduler)


def test_an_elastic_engine_starts_with_what_has_memory(tmp_path):
    node = KvNode(tmp_path, columns=10, backed=18)
    scheduler = hooked(node, blocks=60)
    scheduler.schedule()

    assert scheduler._valve.engine.withheld == set(range(18, 60))
    assert run(ToyScheduler(), prompts(1, 8), depth=1) == run(scheduler, prompts(1, 8), depth=1)
    close(scheduler)
    node.stop()


def test_free_columns_are_offered_when_valved_asks_and_used_again_when_given_back(node):
    """Nobody is preempted for an offer; an offered block stays withheld until its entry changes and is backed."""
    scheduler = hooked(node, blocks=60)
    scheduler.add("a", range(12), 8)
    scheduler.launch()
    held = {block.block_id for block in scheduler.req_to_blocks["a"]}
    node.aim(20)
    scheduler.believe()
    scheduler.launch()
    offered = node.offered()

    assert 60 - len(offered) <= 26
    assert not held & set(offered)
    assert {block for block in range(60) if node.column_of[block] in node.column_of[offered]} == set(offered)
    wait_for(lambda: node.needs, "valved is told to look")

    node.aim(60)
    node.take(offered)
    scheduler.believe()
    scheduler.launch()

    assert node.offered() == []
    assert scheduler._valve.engine.withheld == set(offered)

    node.give(offered)
    scheduler.believe()
    scheduler.launch()

    assert scheduler._valve.engine.withheld == set()
    assert scheduler.requests["a"].num_computed_tokens > 0
    close(scheduler)


def test_an_engine_without_requests_still_gives_back_and_takes_up(node):
    """It takes no step, so nobody asks the hook: the link's thread looks instead."""
    scheduler = hooked(node, blocks=60)
    run(scheduler, prompts(1, 3), depth=1)
    scheduler.launch()
    node.aim(10)
    wait_for(lambda: len(node.offered()) >= 40, "columns are offered")
    offered = node.offered()
    node.aim(60)
    node.take(offered)
    wait_for(lambda: node.book()["epoch_seen"] == node.epoch, "the loss is acted on")
    node.give(offered)
    wait_for(lambda: not scheduler._valve.engine.withheld, "the blocks are handed out again")
    scheduler.check_integrity()

    done = run(scheduler, prompts(2, 6), depth=2)

    assert run(ToyScheduler(), prompts(2, 6), depth=2) == done
    close(scheduler)


def test_the_book_names_who_holds_what(node):
    scheduler = hooked(node, blocks=60)
    for name, prompt, tokens in prompts(1, 12):
        scheduler.add(name, prompt, tokens)
    for _ in range(12):
        scheduler.launch()
        scheduler.believe()
        scheduler.launch()
        held = sorted([block.block_id for block in table] for table in scheduler.req_to_blocks.values())
        wait_for(lambda held=held: sorted(node.rows().values()) == held, "the book is up to date while nobody steps")
        scheduler.believe()
    close(scheduler)


@pytest.mark.parametrize("version", ["0.29.0", "0.33.1+cpu"])
def test_known_releases_are_taken(version):
    check.refuse_version(version)


@pytest.mark.parametrize("version", ["0.28.0", "0.34.0", "1.0", "dev", ""])
def test_other_releases_are_refused_with_both_versions_named(version, monkeypatch):
    monkeypatch.delenv(check.ENV_UNTESTED, raising=False)
    with pytest.raises(Refused, match=r"valve_hook 0\.1\.0") as refused:
        check.refuse_version(version)

    assert version in str(refused.value)


def test_a_table_that_no_rank_has_joined_never_replaces_one_that_had_ranks(node, link):
    """A valved that has just come back may hear of the ranks after the hook: until then every block looks backed."""
    first = link.attach(WANTED, FOR_EVER_S)
    node.stop()
    node.is_blank = True
    node.start()
    wait_for(lambda: "ranges" in link.said, "the hook asks again")

    assert link.session is first
    node.is_blank = False
    wait_for(lambda: link.session is not first, "the ranks are known")
