"""What an engine says that it has, and the requests that go on for it; who lost what, and who only unloaded it."""

from __future__ import annotations

import json

import pytest
from valve_router.adapters import HeldAdapters, PublishedAdapters
from valve_router.listing import Base, listing_of, renamed


def told(*names, owner="vllm", base="base", root="/models/base"):
    loaded = [{"id": name, "parent": base, "root": f"/adapters/{name}"} for name in names]
    return json.dumps({"data": [{"id": base, "owned_by": owner, "parent": None, "root": root}, *loaded]}).encode()


@pytest.mark.parametrize(
    ("answer", "newest"),
    [
        (told(), None),
        (told("chat-v2", "chat-v10", "chat-v9"), "chat-v10"),
        (told("chat-v2", owner="sglang"), "base:chat-v2"),
        (told("chat-v2", base="chat-v3"), "chat-v2"),
        (told("other-v3", "chat-v", "chat-v01", "a-chat-v4", "chat-v1-v2"), None),
    ],
)
def test_the_newest_version_is_by_number_and_of_that_name_alone(answer, newest):
    assert listing_of(answer, ("chat",)).asked.get("chat") == newest


def test_an_sglang_is_never_asked_for_the_bare_name_of_an_adapter():
    """It would answer as the base, under the adapter's name."""
    asked = listing_of(told("chat-v2", owner="sglang"), ()).asked
    assert asked == {"base": "base", "chat-v2": "base:chat-v2", "base:chat-v2": "base:chat-v2"}


def test_a_listing_keeps_where_adapters_lie_and_whose_they_are():
    listing = listing_of(told("chat-v2"), ())
    assert listing.adapters["chat-v2"].path == "/adapters/chat-v2"
    assert listing.adapters["chat-v2"].base == Base(name="base", root="/models/base")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": ', b"\xff", b"[" * 100_000])
def test_what_is_no_request_goes_on_byte_by_byte(body):
    assert renamed(body, "chat-v2") is body


def test_of_a_request_that_asks_for_it_nothing_else_is_changed():
    rest = b'"seed":12345678901234567890123,"temperature":1.10,"text":"\\u00e9 chat"'
    assert renamed(b'{"model": "chat",' + rest + b"}", "chat-v2") == b'{"model":"chat-v2",' + rest + b"}"


class Seen:
    """Replicas that say in turn what they have."""

    def __init__(self, count=1, aliases=("chat",)):
        self.aliases, self.published = aliases, PublishedAdapters(aliases)
        self.held = [HeldAdapters() for _ in range(count)]

    def says(self, index, *names, **more):
        self.published.listed(self.held[index], listing_of(told(*names, **more), self.aliases), self.held)
        return set(self.held[index].lost)


def test_what_was_unloaded_is_never_taken_for_lost():
    seen = Seen()
    seen.says(0, "chat-v1", "chat-v2")
    assert seen.says(0, "chat-v1") == set()  # rolled back, in sight
    seen.held[0].away()
    assert seen.says(0, "chat-v1") == set()  # it was slow, not new
    seen.says(0, "chat-v1", "chat-v2")
    seen.held[0].away()
    assert seen.says(0, "chat-v2", "chat-v3") == set()  # retired while it was slow


def test_what_an_engine_had_before_it_restarted_is_lost_until_it_has_it_again():
    seen = Seen()
    seen.says(0, "chat-v1", "chat-v2", "other")
    seen.held[0].away()
    assert seen.says(0) == {"chat-v1", "chat-v2", "other"}
    assert seen.says(0, "chat-v2") == {"chat-v1", "other"}
    assert seen.says(0, "chat-v1", "chat-v2", "other") == set()


def test_an_adapter_is_never_expected_of_another_base():
    seen = Seen(2)
    seen.says(0, "chat-v1")
    seen.held[0].away()
    assert seen.says(0, base="other") == set()
    assert seen.says(0, root="/models/other") == set()
    seen.held[1].away()  # one that is new while the router runs
    assert seen.says(1, base="other") == set()


def test_who_comes_later_gets_the_newest_version_that_the_others_have_and_no_other_adapter():
    seen = Seen(2)
    seen.says(0, "chat-v1", "chat-v2", "other-v5")
    seen.held[1].away()
    assert seen.says(1) == {"chat-v2"}


def test_somebody_elses_newer_version_is_never_joined_by_an_older_one():
    seen = Seen()
    seen.says(0, "chat-v1", "chat-v2")
    seen.held[0].away()
    assert seen.says(0, "chat-v3") == set()


def test_a_name_is_published_while_somebody_has_it_or_lost_it_and_an_alias_for_good():
    seen = Seen(2)
    assert seen.published.names == set()
    seen.says(0, "chat-v1")
    seen.says(1, "other", owner="sglang")
    assert seen.published.names == {"chat", "chat-v1", "other", "base:other"}
    seen.held[0].away()
    seen.says(0)
    assert seen.published.names == {"chat", "chat-v1", "other", "base:other"}
    seen.held[0].lost.clear()
    seen.says(0)
    assert seen.published.names == {"chat", "other", "base:other"}


def test_what_was_retired_elsewhere_meanwhile_is_never_loaded_again():
    seen = Seen(2)
    for index in range(2):
        seen.says(index, "chat-v1", "chat-v2")
    seen.held[1].away()
    seen.says(0, "chat-v2", "chat-v3")
    assert seen.says(1) == {"chat-v2", "chat-v3"}
    assert "chat-v1" not in seen.published.names
    seen.says(0, "chat-v3", "chat-v4")  # and while it waits for what it lost
    assert seen.says(1) == {"chat-v3"}


def test_what_every_replica_lost_is_never_taken_for_retired():
    seen = Seen(2)
    for index in range(2):
        seen.says(index, "chat-v1", "chat-v2")
    for one in seen.held:
        one.away()
    assert seen.says(0) == seen.says(1) == {"chat-v1", "chat-v2"}
    seen.says(0, "chat-v2")
    assert seen.says(1) == {"chat-v1", "chat-v2"}


def test_a_lost_version_that_cannot_be_loaded_is_never_published_for_ever():
    seen = Seen()
    seen.says(0, "chat-v1", "chat-v2")
    seen.held[0].away()
    seen.says(0)
    seen.published.given(seen.held[0], ["chat-v1", "chat-v2"], seen.held)
    assert set(seen.held[0].lost) == {"chat-v1", "chat-v2"}  # neither is there: both are tried again
    assert seen.says(0, "chat-v2") == {"chat-v1"}
    seen.published.given(seen.held[0], ["chat-v1"], seen.held)
    assert not seen.held[0].lost
    assert "chat-v1" not in seen.published.names
