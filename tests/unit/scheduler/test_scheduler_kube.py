"""The API client and its reflector.

What is seen stays true through pages, dropped watches, 410 and refusals.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from fakeapi import GONE, HANG_UP, FakeApi, bookmark, event, item, until
from plain_words import python_in
from valve_kube import failures
from valve_kube.client import MOST_RETRY_S, ApiError, KubeClient, Unreachable
from valve_kube.errors import in_words
from valve_kube.reflector import Reflector, Sink


class View:
    """Names by version as a sink sees them."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def sink(self) -> Sink:
        return Sink(
            replace=self._replace,
            put=self._put,
            drop=lambda one: self.found.pop(one["metadata"]["name"], None),
        )

    def _replace(self, items: list[dict[str, dict[str, str]]]) -> None:
        self.found = {}
        for one in items:
            self._put(one)

    def _put(self, one: dict[str, dict[str, str]]) -> None:
        self.found[one["metadata"]["name"]] = one["metadata"]["resourceVersion"]


def follow(api: FakeApi, story: Callable[[View, Reflector], Awaitable[None]]) -> None:
    """Run a reflector against the fake server while the story is told."""

    async def run() -> None:
        async with api as access:
            client, view = KubeClient(access), View()
            reflector = Reflector(client, "/things", view.sink())
            task = asyncio.create_task(reflector.run())
            try:
                await story(view, reflector)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                client.close()

    asyncio.run(run())


def call(api: FakeApi, method: str = "GET", timeout_s: float = 5.0) -> dict[str, object]:
    async def run() -> dict[str, object]:
        async with api as access:
            client = KubeClient(access, timeout_s=timeout_s)
            try:
                return await client.request(method, "/things", body={"a": 1} if method == "POST" else None)
            finally:
                client.close()

    return asyncio.run(run())


def test_a_list_is_read_page_by_page_then_followed() -> None:
    api = FakeApi()
    api.items, api.version = [item(name, 1) for name in "abcde"], 7
    api.watches = [[event("MODIFIED", "a", 8), event("ADDED", "f", 9), event("DELETED", "b", 10), None]]

    async def story(view: View, reflector: Reflector) -> None:
        await until(lambda: view.found == {"a": "8", "c": "1", "d": "1", "e": "1", "f": "9"})
        assert reflector.synced
        assert api.seen[3][1]["resourceVersion"] == "7"

    follow(api, story)


@pytest.mark.parametrize("ending", [[], [HANG_UP]], ids=["in order", "cut off"])
def test_a_watch_that_ends_goes_on_from_the_last_bookmark_without_a_new_list(ending: list[str]) -> None:
    api = FakeApi()
    api.watches = [[event("ADDED", "a", 5), bookmark(6), *ending]]

    async def story(view: View, reflector: Reflector) -> None:
        await until(lambda: len(api.seen) == 3)
        assert api.seen[2][1]["resourceVersion"] == "6"
        assert (reflector.lists, view.found) == (1, {"a": "5"})

    follow(api, story)


def test_gone_leads_to_a_new_list_and_what_vanished_meanwhile_is_dropped() -> None:
    api = FakeApi()
    api.items = [item("a", 1)]
    api.watches = [[event("ADDED", "lost", 5), GONE]]

    async def story(view: View, reflector: Reflector) -> None:
        await until(lambda: reflector.lists == 2)
        assert view.found == {"a": "1"}

    follow(api, story)


def test_a_relist_is_not_synced_until_a_new_consistent_list_was_read() -> None:
    api = FakeApi()

    async def story(view: View, reflector: Reflector) -> None:
        await reflector.wait_synced()
        await until(lambda: len(api.seen) == 2)
        api.items = [item("new", 3)]

        reflector.relist()

        assert not reflector.synced
        await reflector.wait_synced()
        assert view.found == {"new": "3"}
        assert "resourceVersion" not in api.seen[2][1]

    follow(api, story)


class Stubborn(KubeClient):
    """Its first watch loses its cancellation, as asyncio's wait_for does when a result arrives at the same moment."""

    def __init__(self) -> None:
        self.lists = 0
        self.watching = asyncio.Event()

    async def list(self, *_: object, **__: object) -> tuple[list[dict[str, object]], str]:
        self.lists += 1
        return [item("a", self.lists)], str(self.lists)

    async def watch(self, *_: object, **__: object) -> AsyncIterator[dict[str, object]]:
        try:
            self.watching.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.lists > 1:
                raise
            yield event("MODIFIED", "old", 99)
        await asyncio.Event().wait()


def test_a_relist_is_not_lost_with_the_cancellation_of_the_watch() -> None:
    """Guards an extender that stayed not ready for minutes after it had become the leader's."""

    async def run() -> tuple[int, dict[str, str]]:
        client, view = Stubborn(), View()
        reflector = Reflector(client, "/things", view.sink())
        task = asyncio.create_task(reflector.run())
        await client.watching.wait()
        reflector.relist()
        await until(lambda: reflector.synced)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        return client.lists, view.found

    assert asyncio.run(run()) == (2, {"a": "2"})


def test_a_refused_list_is_tried_again() -> None:
    api = FakeApi()
    api.answers = [(403, {"reason": "Forbidden"}, {}), (500, {}, {}), (429, {}, {})]
    api.items = [item("a", 1)]

    async def story(view: View, reflector: Reflector) -> None:
        await until(lambda: view.found == {"a": "1"})

    follow(api, story)


def test_a_refusal_carries_reason_message_and_when_to_come_back() -> None:
    api = FakeApi()
    api.answers = [(429, {"reason": "TooManyRequests", "message": "slow down"}, {"Retry-After": "3"})]

    with pytest.raises(ApiError) as refused:
        call(api)

    error = refused.value
    assert (error.status, error.reason, error.message, error.retry_after_s) == (
        429,
        "TooManyRequests",
        "slow down",
        3.0,
    )


def test_no_answer_is_told_from_a_refusal() -> None:
    api = FakeApi()
    api.answers = [(0, {}, {})]

    with pytest.raises(Unreachable):
        call(api, "POST")
    assert len(api.seen) == 1  # a write is never repeated on its own


def test_a_connection_that_the_server_closed_in_a_quiet_time_is_not_written_to() -> None:
    """API servers do so after 90 s: a Binding sent into it would be undecided, and its GPUs held for nothing."""

    async def run() -> None:
        api = FakeApi()
        async with api as access:
            client = KubeClient(access)
            await asyncio.gather(*(client.request("GET", "/things") for _ in range(3)))
            kept = list(client._idle)
            for task in list(api._tasks):
                task.cancel()
            await until(lambda: all(reader.at_eof() for reader, _ in kept))

            assert await client.request("POST", "/things", body={})
            client.close()

        assert [verb for verb, _ in api.seen].count("POST /things") == 1

    asyncio.run(run())


def test_a_kept_connection_that_was_closed_is_replaced_for_reads() -> None:
    async def run() -> None:
        api = FakeApi()
        async with api as access:
            client = KubeClient(access)
            await client.request("GET", "/things")
            api.answers = [(0, {}, {})]
            await client.request("GET", "/things")
            assert len(api.seen) == 3
            client.close()

    asyncio.run(run())


def test_a_server_that_is_not_there_is_unreachable() -> None:
    async def run() -> None:
        api = FakeApi()
        async with api as access:
            pass
        with pytest.raises(Unreachable):
            await KubeClient(access).request("GET", "/things")

    asyncio.run(run())


def test_a_server_that_goes_away_under_a_watch_is_asked_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node watches: ten tries a second of each would meet a server that comes back."""
    slept: list[float] = []
    really_sleep = asyncio.sleep

    class Client:
        tries = 0

        async def list(self, *_: object) -> tuple[list[object], str]:
            return [item("a", 1)], "1"

        async def watch(self, *_: object, **__: object) -> AsyncIterator[object]:
            self.tries += 1
            if self.tries == 7:  # it answers once, and is gone again
                yield event("ADDED", "b", 2)
            raise Unreachable("gone")

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await really_sleep(0)

    async def run() -> None:
        reflector = Reflector(Client(), "/things", View().sink())  # type: ignore[arg-type]
        monkeypatch.setattr(asyncio, "sleep", sleep)
        task = asyncio.create_task(reflector.run())
        while len(slept) < 8 and not task.done():
            await really_sleep(0)
        monkeypatch.undo()
        assert task.cancel(), task.exception()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())

    assert [0.1 * 2**n <= slept[n] <= 0.15 * 2**n for n in range(6)] == [True] * 6
    assert slept[6] <= 0.15
    assert 0.2 <= slept[7] <= 0.3


def test_an_object_that_its_sink_cannot_take_never_ends_the_view_of_all_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A KeyError at one event ended the extender and the controller; the kubelet had them back before a test asked."""
    api, before = FakeApi(), failures.objects["things"]
    api.items, api.version = [item("a", 1)], 1
    api.watches = [[event("ADDED", "bad", 2), event("ADDED", "b", 3), event("DELETED", "bad", 4), None]]

    async def run() -> tuple[dict[str, str], bool]:
        async with api as access:
            client, view = KubeClient(access), View()

            def refuse(one: dict[str, dict[str, str]]) -> None:
                if one["metadata"]["name"] == "bad":
                    raise KeyError("phase")
                view._put(one)

            reflector = Reflector(client, "/things", Sink(replace=view._replace, put=refuse, drop=refuse))
            task = asyncio.create_task(reflector.run())
            await until(lambda: reflector._version == "4")
            ended = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            client.close()
            return view.found, ended

    assert asyncio.run(run()) == ({"a": "1", "b": "3"}, False)
    told = [record for record in caplog.records if record.name == "valve_kube.failures"]
    assert {getattr(record, "object", "") for record in told if record.levelno >= logging.ERROR} == {"/bad"}
    assert failures.objects["things"] - before == len(told) == 2


def test_a_list_that_its_sink_cannot_take_never_ends_the_process_nor_counts_as_a_view() -> None:
    api = FakeApi()
    api.items = [item("a", 1)]
    defects = [RuntimeError("defect")]

    async def run() -> list[bool]:
        async with api as access:
            client, view, seen = KubeClient(access), View(), []

            def replace(items: list[dict[str, dict[str, str]]]) -> None:
                if defects:
                    seen.append(reflector.synced)
                    raise defects.pop()
                view._replace(items)

            reflector = Reflector(client, "/things", Sink(replace=replace, put=view._put, drop=view._put))
            task = asyncio.create_task(reflector.run())
            await until(lambda: bool(view.found))
            seen.append(reflector.synced)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            client.close()
            return seen

    before = failures.rounds["view of things"]
    assert asyncio.run(run()) == [False, True]
    assert failures.rounds["view of things"] == before + 1


@pytest.mark.parametrize("told", ["\N{SUPERSCRIPT TWO}", "9" * 400, "Wed, 21 Oct 2026 07:28:00 GMT", "-1"])
def test_a_word_on_when_to_come_back_never_ends_a_view_nor_keeps_it_away_for_long(told: str) -> None:
    api = FakeApi()
    api.answers = [(503, {"reason": "x"}, {"Retry-After": told})]

    with pytest.raises(ApiError) as refused:
        call(api)

    assert 0 <= refused.value.retry_after_s <= MOST_RETRY_S


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("gpus"), "gpus is missing"),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (FileNotFoundError(2, "No such file or directory", "/a/file"), "/a/file: No such file or directory"),
        (asyncio.TimeoutError(), "no answer in time"),
        (ValueError("7 is too many"), "7 is too many"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_an_error_is_never_told_as_python_writes_it(error: Exception, words: str) -> None:
    assert in_words(error) == words
    assert python_in(in_words(error)) == []
    assert python_in(repr(error)) != [] or not error.args
