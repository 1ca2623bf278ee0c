"""The brake of the fleet: one write, and the nodes' own word where they can be asked for it."""

import asyncio
from typing import Any

import pytest
from fakeapi import FakeApi
from valve_kube.client import KubeClient
from valve_scheduler.cli.pause import NotAll, Paused, pause, resume

Json = dict[str, Any]
NO_ANSWER: tuple[int, Json, dict[str, str]] = (0, {}, {})


def ok(answer: Json | None = None) -> tuple[int, Json, dict[str, str]]:
    return 200, answer or {}, {}


def said(**phases: str) -> tuple[int, Json, dict[str, str]]:
    """The table that the API server makes of the nodes."""
    columns = [{"name": name} for name in ("Name", "Mode", "Phase")]
    return ok({"columnDefinitions": columns, "rows": [{"cells": [node, "", word]} for node, word in phases.items()]})


def paused(answers: list[tuple[int, Json, dict[str, str]]], wait_s: float) -> Paused:
    """What `pause` makes of these answers, in the order of its requests."""

    async def run() -> Paused:
        api = FakeApi()
        api.answers = answers
        async with api as access:
            return await pause(KubeClient(access), wait_s=wait_s)

    return asyncio.run(run())


def test_a_pause_is_one_write_and_waits_for_every_node_to_say_so() -> None:
    done = paused([ok(), said(n1="Harvesting", n2="Paused"), said(n1="Paused", n2="Paused")], 60.0)

    assert (done.nodes, done.confirmed) == (2, 2)


def test_a_pause_that_stands_already_is_pulled_again_for_all_nodes() -> None:
    async def run() -> list[str]:
        api = FakeApi()
        api.answers = [(409, {"reason": "AlreadyExists"}, {}), ok(), said()]
        async with api as access:
            assert (await pause(KubeClient(access), wait_s=60.0)).nodes == 0
        assert b'"nodeSelector":null' in api.writes[1]
        return [request.partition(" ")[0] for request, _ in api.seen]

    assert asyncio.run(run()) == ["POST", "PATCH", "GET"]


def test_an_api_server_too_busy_to_say_who_has_heard_is_asked_again() -> None:
    assert paused([ok(), NO_ANSWER, NO_ANSWER, said(n1="Off")], 60.0).confirmed == 1


def test_without_waiting_the_pause_is_set_and_the_rest_is_counted() -> None:
    done = paused([ok(), said(n1="Harvesting", n2="Observing")], 0.0)

    assert (done.nodes, done.confirmed) == (2, 1)


@pytest.mark.parametrize(
    ("answer", "told"),
    [(said(n1="Harvesting"), "1 of 1 nodes have not confirmed it: n1"), (NO_ANSWER, "it is unknown")],
)
def test_who_has_not_confirmed_in_time_is_named(answer: tuple[int, Json, dict[str, str]], told: str) -> None:
    with pytest.raises(NotAll, match=f"the pause is set[;,] .*{told}"):
        paused([ok(), *([answer] * 50)], 0.001)


@pytest.mark.parametrize(("status", "lifted"), [(200, True), (404, False)])
def test_a_pause_is_lifted_once(status: int, lifted: bool) -> None:
    async def run() -> bool:
        api = FakeApi()
        api.answers = [(status, {}, {})]
        async with api as access:
            return await resume(KubeClient(access))

    assert asyncio.run(run()) is lifted
