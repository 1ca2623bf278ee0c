"""Answers what Envoy says of one request: the endpoint picker's half of an ext-proc stream, without its socket.

Envoy sends the request's headers and body before it chooses an endpoint, and the answer's afterwards. The picker holds
the headers back until the prompt is known, names the replica, and passes each body on as it came. Gateways agree on the
names below: https://github.com/kubernetes-sigs/gateway-api-inference-extension, proposal 004.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from valve_router.checkups import ModelLooks
from valve_router.counts import EVENTS, GIVEN_UP, REPLICA_HEADER, Counts
from valve_router.doubts import DOUBTED, Lacking, has_changed
from valve_router.prompt import READ_BYTES, AskedBody
from valve_router.replicas import Full, NobodyAlive, Replica, Replicas, Sent

CHOSEN = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
UPSTREAM = "upstream.address"
CHOSEN_IN = "envoy.lb"
SUBSET_IN = "envoy.lb.subset_hint"
FAILED = frozenset({502, 503, 504})  # what a gateway answers for a replica that does not


class NeverSaid(Exception):
    """Envoy never says this at this place."""


@dataclass(slots=True)
class HeldBodies:
    """Bytes of bodies that wait for their end, over all requests. Where they reach `most`, prompts go unread."""

    most: int
    bytes: int = 0

    @property
    def is_full(self) -> bool:
        return self.bytes >= self.most


def endpoint_of(replica: Replica) -> str:
    return urlsplit(replica.url).netloc


class Exchange:
    """One request. `end` is called once, however the stream ended."""

    def __init__(self, replicas: Replicas, counts: Counts, held: HeldBodies, now_s: Callable[[], float]) -> None:
        self._replicas, self._counts, self._held, self._now_s = replicas, counts, held, now_s
        self._asked_mode = self._answer_mode = ProcessingMode.FULL_DUPLEX_STREAMED  # until Envoy says another
        self._pieces: list[Any] = []  # of the request's body, held
        self._but: list[Replica] = []
        self._sent: Sent | None = None
        self._asked_model = ""  # of the body no more is kept: an answer may take minutes
        self._is_lacking = False  # its replica has not what is asked for
        self._status = 0  # of the answer; 0: none yet
        self._has_begun = self._streams_events = self._is_answered = False
        self._piece_s = 0.0
        self.is_refused = False

    def on(self, message: Any) -> list[Any]:
        """What to send back; nothing while the body is held."""
        if message.observability_mode:  # Envoy does not wait, and sends the request wherever it likes
            return []
        kind = message.WhichOneof("request")
        is_first = kind == "request_headers"
        is_early = (kind or "").startswith("response") and self._sent is None
        if kind is None or self.is_refused or is_first == self._has_begun or is_early:
            raise NeverSaid(kind or "nothing known")
        self._has_begun = True
        if is_first and message.HasField("protocol_config"):
            self._asked_mode = message.protocol_config.request_body_mode
            self._answer_mode = message.protocol_config.response_body_mode
        answers: list[Any] = getattr(self, f"_on_{kind}")(message)
        return answers

    @property
    def is_chosen(self) -> bool:
        return self._sent is not None

    def late(self) -> list[Any]:
        """Nothing came for too long. A request whose body does not come is refused; of an answer that does not come
        nothing can be said: it counts as given up, and the gateway has its own limit."""
        return [self._refuse(408, "the body did not come")] if self._has_begun and self._sent is None else []

    def end(self) -> None:
        self._let_go()
        if self._sent is not None and self._sent.is_open:  # Envoy shows no end where it shows no body
            is_whole = self._answer_mode == ProcessingMode.NONE and 0 < self._status < 500
            self._finish(is_whole=is_whole)

    def _on_request_headers(self, message: Any) -> list[Any]:
        allowed = subset_of(message)
        if allowed is not None:
            self._but = [one for one in self._replicas.all if not allowed & names_of(one)]
        if message.request_headers.end_of_stream or self._asked_mode in (ProcessingMode.NONE, ProcessingMode.STREAMED):
            return [self._pick(b"") or self._answer("request_headers", chosen=True)]
        if self._asked_mode != ProcessingMode.FULL_DUPLEX_STREAMED:  # Envoy sends the whole body after this answer
            return [self._answer("request_headers")]
        return []

    def _on_request_body(self, message: Any) -> list[Any]:
        piece = message.request_body
        if self._asked_mode != ProcessingMode.FULL_DUPLEX_STREAMED:
            is_new = self._sent is None
            refusal = self._pick(piece.body) if is_new else None
            return [refusal or self._answer("request_body", chosen=is_new)]
        if self._sent is not None:
            return [echo("request_body", piece)]
        self._pieces.append(piece)
        self._held.bytes += len(piece.body)
        size = sum(len(one.body) for one in self._pieces)
        if piece.end_of_stream or piece.end_of_stream_without_message or size > READ_BYTES or self._held.is_full:
            return self._pass_on()
        return []

    def _on_request_trailers(self, message: Any) -> list[Any]:
        passed = self._pass_on() if self._sent is None else []
        if not self.is_refused:
            passed.append(ProcessingResponse(request_trailers={}))
        return passed

    def _pass_on(self) -> list[Any]:
        """The choice, and the body that waited for it."""
        refusal = self._pick(b"".join(one.body for one in self._pieces))
        if refusal is not None:
            return [refusal]
        answers = [self._answer("request_headers", chosen=True)]
        answers += [echo("request_body", one) for one in self._pieces]
        self._let_go()
        return answers

    def _let_go(self) -> None:
        self._held.bytes -= sum(len(one.body) for one in self._pieces)
        self._pieces = []

    def _pick(self, body: bytes) -> Any | None:
        """None, or how the request is refused."""
        asked = AskedBody(body)
        if self._replicas.published.names or len(body) <= READ_BYTES:
            self._asked_model = asked.model
        try:
            self._sent = self._replicas.send(asked.prompt, self._but, self._model)
        except Full:
            return self._refuse(429, "every replica is full")
        except NobodyAlive as error:
            return self._refuse(503, str(error))
        self._expect()
        return None

    @property
    def _model(self) -> str:
        """A long body is not read for it where nothing is published."""
        return self._asked_model if self._replicas.published.names else ""

    def _expect(self) -> None:
        """That its replica has what is asked for; the picker can send nothing again."""
        assert self._sent is not None
        held = self._sent.replica.adapters
        self._sent.version, self._sent.losses, self._sent.is_second = held.asks(self._model), held.losses, True

    async def look(self, message: Any, looks: ModelLooks) -> None:
        """Before `on` hears of an answer that may say that an engine has lost an adapter: whether it has."""
        if self._sent is None or message.WhichOneof("request") != "response_headers":
            return
        status = _number(heads_of(message).get(":status", ""))
        if status in DOUBTED:
            self._follow(message)
            try:
                await has_changed(status, self._asked_model, self._sent, self._replicas, looks)
            except Lacking:
                self._is_lacking = True

    def _refuse(self, status: int, why: str) -> Any:
        self.is_refused = True
        self._counts.add(status)
        self._let_go()
        refusal = ProcessingResponse()
        refusal.immediate_response.status.code = status
        refusal.immediate_response.body = json.dumps({"error": {"message": why, "type": "valve_router"}}).encode()
        for key, value in (("content-type", "application/json"), ("retry-after", "1")):
            refusal.immediate_response.headers.set_headers.append(header(key, value))
        return refusal

    def _answer(self, kind: str, *, chosen: bool = False) -> Any:
        answer = ProcessingResponse(**{kind: {}})
        if chosen:
            self._name(answer, getattr(answer, kind).response)
        return answer

    def _name(self, answer: Any, response: Any) -> None:
        """The choice, and the replica that may be tried in its place. Gateways read the header or the metadata."""
        assert self._sent is not None
        instead = self._replicas.instead_of(self._sent.replica, self._but, self._model)
        named = [self._sent.replica] + ([instead] if instead is not None else [])
        endpoints = ",".join(endpoint_of(one) for one in named)
        response.header_mutation.set_headers.append(header(CHOSEN, endpoints))
        response.clear_route_cache = True
        answer.dynamic_metadata.get_or_create_struct(CHOSEN_IN)[CHOSEN] = endpoints

    def _on_response_headers(self, message: Any) -> list[Any]:
        assert self._sent is not None
        found = heads_of(message)
        self._status = _number(found.get(":status", ""))
        self._streams_events = self._status == 200 and found.get("content-type", "").startswith(EVENTS)
        self._piece_s = self._now_s()
        self._follow(message)
        if self._is_lacking:
            self._replicas.ended(self._sent, is_served=False, has_failed=False)
            return [self._refuse(503, f"the replica has no {self._asked_model} now")]
        answer = self._answer("response_headers")
        mutation = answer.response_headers.response.header_mutation
        mutation.set_headers.append(header(REPLICA_HEADER, self._sent.replica.name))
        if message.response_headers.end_of_stream:
            self._finish(is_whole=True)
        return [answer]

    def _on_response_body(self, message: Any) -> list[Any]:
        assert self._sent is not None
        piece, now_s = message.response_body, self._now_s()
        if piece.body and self._streams_events and self._sent.is_open:
            if self._is_answered:
                self._sent.replica.saw_gap(now_s - self._piece_s)
            else:
                self._replicas.answered(self._sent)
            self._is_answered, self._piece_s = True, now_s
        if piece.end_of_stream or piece.end_of_stream_without_message:
            self._finish(is_whole=True)
        if self._answer_mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            return [echo("response_body", piece)]
        return [self._answer("response_body")]

    def _on_response_trailers(self, message: Any) -> list[Any]:
        self._finish(is_whole=True)
        return [ProcessingResponse(response_trailers={})]

    def _follow(self, message: Any) -> None:
        """Where the gateway found the chosen one dead, it tried the other."""
        assert self._sent is not None
        served = served_of(message)
        if not served or served == endpoint_of(self._sent.replica):
            return
        other = next((one for one in self._replicas.all if endpoint_of(one) == served), None)
        if other is not None:
            self._counts.retries += 1
            self._sent = self._replicas.moved(self._sent, other)
            self._expect()

    def _finish(self, *, is_whole: bool) -> None:
        if self._sent is None or not self._sent.is_open:
            return
        has_failed = self._status in FAILED
        self._replicas.ended(self._sent, is_served=is_whole and not has_failed, has_failed=has_failed)
        self._counts.add(self._status if is_whole else GIVEN_UP)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def heads_of(message: Any) -> dict[str, str]:
    return {one.key.lower(): value_of(one) for one in message.response_headers.headers.headers}


def echo(kind: str, piece: Any) -> Any:
    """A piece of a body as it came."""
    answer = ProcessingResponse(**{kind: {}})
    streamed = getattr(answer, kind).response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = piece.body, piece.end_of_stream
    streamed.end_of_stream_without_message = piece.end_of_stream_without_message
    return answer


def header(key: str, value: str) -> Any:
    """In the place of what a client may have sent under that name."""
    return HeaderValueOption(
        header={"key": key, "raw_value": value.encode()}, append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    )


def value_of(found: Any) -> str:
    return found.raw_value.decode("latin-1") or str(found.value)


def names_of(replica: Replica) -> set[str]:
    """A gateway may name a replica with its port or without."""
    parts = urlsplit(replica.url)
    return {parts.netloc, parts.hostname or "", f"[{parts.hostname}]"}


def subset_of(message: Any) -> set[str] | None:
    """The only endpoints that may be chosen, where the gateway says so: a list, or names with commas between them."""
    found = _metadata(message, SUBSET_IN, SUBSET)
    if found is None:
        return None
    values = [one.string_value for one in found.list_value.values] or [found.string_value]
    return {name.strip() for value in values for name in value.split(",") if name.strip()}


def served_of(message: Any) -> str:
    """By the protocol's metadata, or by Envoy's own attribute where it is set up to send that. Empty: not known."""
    found = _metadata(message, CHOSEN_IN, SERVED)
    if found is not None:
        return str(found.string_value)
    for group in message.attributes.values():
        if UPSTREAM in group.fields:
            return str(group.fields[UPSTREAM].string_value)
    return ""


def _metadata(message: Any, namespace: str, key: str) -> Any | None:
    fields = message.metadata_context.filter_metadata
    if namespace not in fields or key not in fields[namespace].fields:
        return None
    return fields[namespace].fields[key]
