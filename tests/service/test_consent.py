"""Consent to granted time: who says it, who hears it, and that it outlives a valved."""

from __future__ import annotations

import pytest
from node_world import World
from valve_kube import names

from valved.abi.link import Feature
from valved.cli import top
from valved.cli.status import notes
from valved.clients.identity import PodClaim
from valved.config import Config, GrantedTable, load_config
from valved.errors import ConfigError, InvalidRequest
from valved.kube.pods import PodBook
from valved.machine.ports import Grants
from valved.machine.stamps import Stamp, StampKind, StopCause
from valved.model.consent import Said
from valved.model.events import EventKind
from valved.model.ids import ProcessId, Role
from valved.model.states import ServiceState
from valved.rpc import convert
from valved.state import saved as files

OFFER = Said(slo="ttft=500ms,tpot=40ms", grant="true")
UID = "3c1f0000-0000-0000-0000-000000000001"
CGROUP = f"/kubepods/burstable/pod{UID}"


def launched(world: World, said: Said, pid: int = 700) -> ServiceState:
    world.processes.add(pid)
    number = world.node.launch(pid, world.processes.start_time(pid), Role.ONLINE, "chat", said)
    return next(one for one in world.node.status().services if one.id == number)


def state(world: World) -> ServiceState:
    return next(one for one in world.node.status().services if one.role is Role.ONLINE)


def test_a_service_that_said_nothing_offers_nothing(tmp_path):
    one = launched(World(tmp_path), Said())

    assert (one.granted.slo, one.granted.grant, one.granted.words) == ("", False, "")


def test_an_offer_is_shown_and_explained_and_says_that_nothing_grants_yet(tmp_path):
    world = World(tmp_path)

    one = launched(world, OFFER)

    assert (one.granted.slo, one.granted.grant) == ("ttft=500ms,tpot=40ms,gap=100ms", True)
    assert one.granted.words == "consents to pauses within ttft=500ms,tpot=40ms,gap=100ms; nothing grants yet"
    assert one.granted.words in world.node.explain("service", one.id).facts
    assert [event.reason for event in world.journal.recent(lambda e: e.kind is EventKind.CONSENT, 9)]
    message = convert.fill(convert.node_pb2.Status(), world.node.status())
    assert any(one.granted.words in str(line) for line in notes(message))


def test_an_offer_outlives_the_valved_that_heard_it(tmp_path):
    world = World(tmp_path)
    launched(world, OFFER)
    world.handover.save()
    saved, _ = files.load(tmp_path / "state.json")

    successor = World(tmp_path, processes=world.processes)
    successor.handover.restore(saved, 2.0)

    assert state(successor).granted.grant


@pytest.mark.parametrize("said", [Said(slo="tpot=40"), Said(slo="tpot=40ms", grant="yes")])
def test_words_without_sense_claim_nothing(tmp_path, said):
    world = World(tmp_path)

    with pytest.raises(InvalidRequest) as refused:
        launched(world, said)

    assert refused.value.field in ("slo", "grant")
    assert not world.books.claims


def test_offline_work_offers_nothing(tmp_path):
    world = World(tmp_path)
    world.processes.add(700)

    with pytest.raises(InvalidRequest):
        world.node.launch(700, 7000, Role.OFFLINE, "batch", OFFER)


def test_the_nodes_configuration_speaks_for_who_says_nothing_and_no_further(tmp_path):
    default = Config(granted=GrantedTable(slo="tpot=50ms", grant="true"))
    world = World(tmp_path, config=default)

    assert launched(world, Said(), 700).granted.slo == "tpot=50ms,gap=100ms"
    assert not launched(world, Said(grant="false"), 701).granted.grant


@pytest.mark.parametrize("table", ['slo = "tpot=40"', 'grant = "true"', 'grant = "maybe"'])
def test_a_default_without_sense_stops_the_start(tmp_path, table):
    path = tmp_path / "valve.toml"
    path.write_text(f"[granted]\n{table}\n")

    with pytest.raises(ConfigError, match="grant"):
        load_config(path, {})


def annotated(**words: str) -> dict[str, str]:
    return {f"{names.DOMAIN}/{key}": value for key, value in words.items()}


def pod(**words: str) -> dict[str, object]:
    return {"metadata": {"uid": UID, "namespace": "serving", "name": "chat", "annotations": annotated(**words)}}


def in_pod(tmp_path, **words: str) -> tuple[World, PodBook]:
    pods = PodBook()
    world = World(tmp_path, pods=pods)
    pods.replace([pod(role="online", **words)])
    world.processes.add(700)
    claim = PodClaim(role=Role.ONLINE, name="serving/chat", cgroup=CGROUP)
    root = ProcessId(pid=700, start_time=world.processes.start_time(700))
    world.register.claimed._book_claim(root, claim.role, claim.name, claim.cgroup)
    return world, pods


def test_a_pods_annotations_are_its_offer_and_taking_them_off_takes_it_back_at_once(tmp_path):
    world, pods = in_pod(tmp_path, slo="tpot=40ms", grant="true")
    assert state(world).granted.grant

    pods.put(pod(role="online", slo="tpot=40ms"))

    assert not state(world).granted.grant


def test_a_namespace_speaks_for_its_pods_until_it_takes_its_word_back(tmp_path):
    world, pods = in_pod(tmp_path)
    space = {"metadata": {"name": "serving", "annotations": annotated(slo="tpot=60ms", grant="true")}}
    other = {"metadata": {"name": "batch", "annotations": annotated(slo="tpot=1ms", grant="true")}}

    pods.replace_namespaces([space, other])
    assert state(world).granted.slo == "tpot=60ms,gap=100ms"
    assert state(world).granted.grant

    pods.drop_namespace(space)
    assert not state(world).granted.grant


@pytest.mark.parametrize("how", ["replace", "put", "drop"])
def test_no_pause_is_granted_after_a_namespace_took_its_word_back(tmp_path, how):
    """The native side goes by what it was told: somebody must tell it."""
    world, pods = in_pod(tmp_path)
    pods.listener.pods_changed = world.granting.refresh
    space = {"metadata": {"name": "serving", "annotations": annotated(slo="tpot=60ms", grant="true")}}
    silent = {"metadata": {"name": "serving"}}
    (service,) = world.gating.online
    pods.replace_namespaces([space])
    told = world.gate.granting.consents
    assert told[service][0] > 0

    match how:
        case "replace":
            pods.replace_namespaces([silent])
        case "put":
            pods.put_namespace(silent)
        case "drop":
            pods.drop_namespace(space)

    assert told[service] == (0, 0)


def test_what_a_namespace_says_of_other_things_wakes_nobody(tmp_path):
    _, pods = in_pod(tmp_path)
    heard = []
    pods.listener.pods_changed = lambda: heard.append(1)
    space = {"metadata": {"name": "serving", "labels": {"team": "a"}}}

    pods.replace_namespaces([space])
    pods.put_namespace(space)
    pods.drop_namespace(space)

    assert not heard


def test_an_annotation_nobody_can_read_grants_nothing_and_says_why(tmp_path):
    world, pods = in_pod(tmp_path, slo="40", grant="true")
    pods.replace_namespaces([{"metadata": {"name": "serving", "annotations": annotated(slo="tpot=1s", grant="true")}}])

    assert not state(world).granted.grant
    assert state(world).granted.words.startswith("no granted time: slo: ")


def test_a_claim_left_for_a_later_valved_keeps_its_offer_and_reads_as_before_without_one():
    import msgspec

    from valved.state.pending import PendingClaim

    silent = PendingClaim(pid=1, start_time=2, name="chat")
    offer = PendingClaim(pid=1, start_time=2, name="chat", slo="tpot=40ms", grant="true")

    assert msgspec.json.decode(msgspec.json.encode(silent)) == {"pid": 1, "start_time": 2, "name": "chat"}
    assert msgspec.json.decode(msgspec.json.encode(offer), type=PendingClaim) == offer


# What the native gate is told


def hooked(world: World, said: Said) -> tuple[int, int]:
    """An online service with a hook. Its number, and the hook's."""
    client = world.online(700, gpus=(0,))
    service = world.books.clients[client].service
    world.consents.say(service, said)
    return service, world.hook(client)


def offline(world: World, pid: int, *, features: Feature = Feature.GRANT, gpus=(0,)) -> int:
    world.processes.add(pid)
    world.node.launch(pid, world.processes.start_time(pid), Role.OFFLINE, f"batch{pid}")
    client = world.hello(pid, features=Feature.GAPS | features).client
    for gpu in gpus:
        world.add_channel(client, gpu=gpu, h_client=0xC1D00000 + client)
    return client


def test_the_gate_and_the_hook_hear_of_a_consent_and_of_its_end(tmp_path):
    world = World(tmp_path)
    service, hook = hooked(world, OFFER)
    told = world.gate.granting

    assert told.consents[service][0] == 100_000_000  # the longest pause that its readers may see
    assert told.consents[service][1] >= 50_000_000  # at most 20 a second
    assert told.offers[hook] == (40_000_000, 100_000_000)

    world.consents.say(service, Said(slo=OFFER.slo, grant="false"))

    assert told.consents[service] == (0, 0)
    assert told.offers[hook] == (0, 0)


def test_a_service_without_consent_is_never_told_of_to_the_gate(tmp_path):
    world = World(tmp_path)
    hooked(world, Said(slo=OFFER.slo))

    assert not world.gate.granting.consents
    assert not world.gate.granting.offers


@pytest.mark.parametrize("what", ["old shim", "two GPUs", "MPS"])
def test_nothing_is_granted_beside_offline_work_that_would_not_stop_itself(tmp_path, what):
    world = World(tmp_path)
    hooked(world, OFFER)
    offline(world, 710)
    assert world.gate.granting.grantable == {0, 1}

    match what:
        case "old shim":
            client = offline(world, 720, features=Feature.GAPS)
            assert world.gate.granting.grantable == frozenset()
        case "two GPUs":
            client = offline(world, 720, gpus=(0, 1))
            assert world.gate.granting.grantable == frozenset()
        case "MPS":
            client = offline(world, 720)
            world.books.clients[client].uses_mps = True
            world.granting.refresh()
            assert world.gate.granting.grantable == {1}
    world.register.leave(client, "exit")
    world.granting.refresh()

    assert world.gate.granting.grantable == {0, 1}


def test_an_old_shim_is_never_welcomed_while_a_grant_goes_on_beside_it(tmp_path):
    """It is looked at before it is answered: the call that ends grants has come back by then."""
    world = World(tmp_path)
    hooked(world, OFFER)
    world.granting.refresh()
    seen = []
    world.processes.add(720)
    world.node.launch(720, world.processes.start_time(720), Role.OFFLINE, "old")
    world.gate.granting.set_grantable = lambda gpus: seen.append((gpus, sorted(world.connections)))

    connection = world.hello(720, features=Feature.GAPS)

    assert seen == [(frozenset(), [client for client in world.connections if client != connection.client])]


def test_the_end_of_a_grant_is_no_preemption_and_delays_nobody(tmp_path):
    world = World(tmp_path)
    service, _ = hooked(world, OFFER)
    offline(world, 710)
    before = state(world)
    stamp = Stamp(
        code=StampKind.GATE,
        service=service,
        client=1,
        gpu=0,
        epoch=4,
        channels=1,
        status=0,
        launch_ns=world.clock.now_ns() + 1,
        seen_ns=world.clock.now_ns() + 2,
        ioctl_ns=world.clock.now_ns() + 3,
        done_ns=world.clock.now_ns() + 4,
        cause=StopCause.GRANT_BROKEN,
    )
    world.gate.stamps.append(stamp)
    world.gating.drain()

    after = state(world)
    assert (after.preemptions, after.delay_ns) == (before.preemptions, before.delay_ns)
    world.gate.stamps.append(stamp._replace(cause=StopCause.RING, epoch=6))
    world.gating.drain()
    assert state(world).preemptions == before.preemptions + 1


def test_what_came_of_an_offer_is_shown(tmp_path):
    world = World(tmp_path)
    service, _ = hooked(world, OFFER)
    assert state(world).granted.words.endswith("; nothing grants yet")

    world.gate.granting.given[service] = Grants(grants=3, broken=1, granted_ns=1_500_000_000, refused={"busy": 2})

    granted = state(world).granted
    assert granted.words.endswith("; 3 pauses of 1.5 s in all, 1 broken by a launch")
    assert granted.refused == {"busy": 2}


# What it would be worth


def steps_seen(world: World, hook: int, ms: float, times: int = 20) -> None:
    for number in range(1, times + 1):
        end_ns = number * 1_000_000_000
        world.gate.granting.steps[hook] = (end_ns - round(ms * 1e6), end_ns)
        world.worths.look()
        world.worths.look()  # the same step again teaches nothing


def a_stop(world: World) -> None:
    for account in world.gating.gpus.values():
        account.latency.add(400_000)


def test_the_worth_is_said_before_anybody_consents(tmp_path):
    world = World(tmp_path)
    service, hook = hooked(world, Said(slo="tpot=24ms"))
    assert "worth unknown: no engine's hook reports its steps" in world.node.explain("service", service).facts

    steps_seen(world, hook, 8.0)
    a_stop(world)
    online = world.gating.online[service]
    online.book.held_ns = online.book.freed_ns = 10**12

    granted = state(world).granted
    assert not granted.grant
    assert granted.worth_points is not None
    assert 0.5 < granted.worth_points < 3
    message = convert.fill(convert.node_pb2.Status(), world.node.status())
    assert any("granting is worth at most " in str(line) for line in notes(message))


def test_a_service_without_words_and_without_steps_is_no_note(tmp_path):
    world = World(tmp_path)
    hooked(world, Said())

    message = convert.fill(convert.node_pb2.Status(), world.node.status())

    assert not any("worth" in str(line) for line in notes(message))


@pytest.mark.parametrize("claim", [(0, 5), (5, 5), (9, 5), (1, 10**20 % 2**63)])
def test_a_step_that_makes_no_sense_teaches_nothing(tmp_path, claim):
    world = World(tmp_path)
    _, hook = hooked(world, OFFER)
    world.gate.granting.steps[hook] = claim

    world.worths.look()

    assert "no engine's hook reports" in state(world).granted.worth


def test_refusals_of_pauses_are_explained_by_reason(tmp_path):
    world = World(tmp_path)
    service, _ = hooked(world, OFFER)
    world.gate.granting.given[service] = Grants(refused={"rate": 3, "busy": 2})

    assert "pauses refused: busy 2, rate 3" in world.node.explain("service", service).facts


def test_top_shows_how_long_pauses_were_given(tmp_path):
    world = World(tmp_path)
    service, _ = hooked(world, OFFER)
    world.gate.granting.given[service] = Grants(grants=3, broken=1, granted_ns=1_500_000_000)
    message = convert.fill(convert.node_pb2.Status(), world.node.status())

    assert [top.granted(one.granted) for one in message.services] == ["1.5 s, 1 broken"]
