"""What a real Envoy said is answered as it was when it was recorded, and what none says ends the stream."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from exchange_record import PORT, cases, parsed, readable
from hypothesis import given
from hypothesis import strategies as st
from valve_router.counts import Counts
from valve_router.exchange import CHOSEN, Exchange, HeldBodies, NeverSaid
from valve_router.replicas import Replicas
from valve_router.settings import RouterSettings

RECORD = cases(Path(__file__).with_name("exchanges.jsonl"))
URLS = tuple(f"http://127.0.0.1:{PORT + index}" for index in range(2))


class Scene:
    def __init__(self, most=1 << 20):
        self.replicas = Replicas(RouterSettings(replicas=URLS), lambda: 0.0)
        self.counts, self.held = Counts(), HeldBodies(most)

    def exchange(self):
        return Exchange(self.replicas, self.counts, self.held, lambda: 0.0)

    @property
    def under_way(self):
        return sum(one.under_way for one in self.replicas.all)


@pytest.mark.parametrize("name", RECORD)
def test_an_answer_to_envoy_never_changes_unseen(name):
    said, counted = RECORD[name]
    scene = Scene()
    exchange = scene.exchange()
    for one in said:
        answers = exchange.on(parsed(ProcessingRequest, one["message"]))
        assert [readable(answer) for answer in answers] == one["answers"]
    exchange.end()
    assert scene.under_way == scene.held.bytes == 0
    assert {str(status): count for status, count in scene.counts.requests.items()} == counted["counted"]
    assert scene.counts.retries == counted["retries"]


def test_a_prompt_is_never_chosen_for_before_it_is_known():
    scene = Scene()
    exchange = scene.exchange()
    assert exchange.on(ProcessingRequest(request_headers={})) == []
    assert exchange.on(ProcessingRequest(request_body={"body": b'{"prompt": "a'})) == []
    chosen, first, last = exchange.on(ProcessingRequest(request_body={"body": b'b"}', "end_of_stream": True}))
    assert chosen.request_headers.response.header_mutation.set_headers[0].header.key == CHOSEN
    passed = [one.request_body.response.body_mutation.streamed_response for one in (first, last)]
    assert [one.body for one in passed] == [b'{"prompt": "a', b'b"}']
    assert [one.end_of_stream for one in passed] == [False, True]


def test_bodies_are_never_held_beyond_the_limit():
    scene = Scene(most=1000)
    waiting = scene.exchange()
    waiting.on(ProcessingRequest(request_headers={}))
    assert waiting.on(ProcessingRequest(request_body={"body": b"a" * 999})) == []
    other = scene.exchange()
    other.on(ProcessingRequest(request_headers={}))
    assert other.on(ProcessingRequest(request_body={"body": b"a"}))  # chosen at once, for a prompt that is unknown
    assert scene.held.bytes == 999
    for one in (waiting, other):
        one.end()
    assert scene.held.bytes == scene.under_way == 0


def test_a_body_is_never_kept_after_the_choice():
    """An answer may take minutes, and HeldBodies counts no body by then."""
    scene = Scene()
    exchange = scene.exchange()
    exchange.on(ProcessingRequest(request_headers={}))
    tracemalloc.start()
    try:
        for body, is_last in ((b'{"prompt": "' + b"a" * 500_000, False), (b'"}', True)):
            exchange.on(ProcessingRequest(request_body={"body": body, "end_of_stream": is_last}))
        assert exchange.is_chosen
        del body
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 250_000
    finally:
        tracemalloc.stop()
        exchange.end()


def message_of(kind, body, is_last, status, mode, served):
    message = ProcessingRequest(**{kind: {}})
    part = getattr(message, kind)
    if kind.endswith("headers"):
        part.end_of_stream = is_last
        part.headers.headers.add(key=":status", raw_value=status.encode())
    elif kind.endswith("body"):
        part.body, part.end_of_stream = body, is_last
    if mode is not None:
        message.protocol_config.request_body_mode = message.protocol_config.response_body_mode = mode
    if served is not None:
        message.metadata_context.filter_metadata["envoy.lb"]["x-gateway-destination-endpoint-served"] = served
    return message


KINDS = [f"{half}_{part}" for half in ("request", "response") for part in ("headers", "body", "trailers")]
MESSAGES = st.builds(
    message_of,
    st.sampled_from(KINDS),
    st.sampled_from([b"", b"{", b'{"prompt": "a"}']),
    st.booleans(),
    st.sampled_from(["200", "503", "", "?"]),
    st.sampled_from([None, *ProcessingMode.BodySendMode.values()]),
    st.sampled_from([None, f"127.0.0.1:{PORT}", "10.0.0.9:1"]),
)


@given(st.lists(MESSAGES, max_size=12), st.booleans())
def test_no_order_of_messages_leaves_a_request_open_or_a_body_held(messages, is_full):
    scene = Scene(most=0 if is_full else 1 << 20)
    exchange = scene.exchange()
    try:
        for message in messages:
            exchange.on(message)
            assert scene.held.bytes >= 0
    except NeverSaid:
        pass
    exchange.end()
    assert scene.under_way == scene.held.bytes == 0
    assert sum(one.served + one.failed for one in scene.replicas.all) <= 1 + scene.counts.retries
