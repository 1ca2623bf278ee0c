"""A log is for whoever reads it; nobody waits for them."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from types import SimpleNamespace

import pytest

from valved import logs
from valved.logs import BURST, MOST_SHARES, JsonFormatter, Limiter, Writer
from valved.model.events import Event, EventKind

LINES = 20_000  # far more than a pipe and the queue hold


@pytest.fixture
def logger():
    found = logging.getLogger("test-logs")
    found.propagate = False
    found.setLevel(logging.INFO)
    yield found
    found.handlers.clear()


def refused(logger, uid, number=0):
    event = Event(
        seq=number, t_ns=1, kind=EventKind.REFUSED, service=0, client=0, gpus=(), reason="no", detail={"uid": uid}
    )
    logger.info("refused", extra={"event": event})


def came_and_went(logger, kind, pid):
    logger.info(kind.value, extra={"event": Event(0, 0, kind, 0, 0, (), "", {"pid": pid})})


def limited(logger, monkeypatch, step_s, told):
    """A limiter of what the logger logs, one line each `step_s`. `told`: what passes it."""
    clock = itertools.count(step=step_s)
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    limiter = Limiter()
    handler = logging.NullHandler()
    handler.handle = lambda record: told.append(record.event) if limiter.filter(record) else None
    logger.addHandler(handler)
    return limiter


def test_a_log_that_nobody_reads_never_holds_up_who_writes_it(logger):
    """64 KiB of refusals in a pipe, and the daemon's only thread stood in write(2)."""
    read, write = os.pipe()
    handler = Writer(os.fdopen(write, "w"), most=100)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    done = threading.Event()

    def chatter():
        for number in range(LINES):
            logger.info("line %06d", number)
        done.set()

    threading.Thread(target=chatter, daemon=True).start()

    assert done.wait(200)

    said, lost, rest = 0, 0, b""
    while said + lost < LINES:
        rest += os.read(read, 1 << 20)
        *lines, rest = rest.split(b"\n")
        for line in map(json.loads, lines):
            lost += line.get("count", 0)
            said += "count" not in line

    assert lost > 0
    os.close(read)


def test_one_user_never_fills_the_log(logger, capsys):
    seen = []

    class Keep(logging.Handler):
        def emit(self, record):
            seen.append(json.loads(JsonFormatter().format(record)))

    handler = Keep()
    handler.addFilter(Limiter())
    logger.addHandler(handler)

    for number in range(1000):
        refused(logger, uid=1000, number=number)
    refused(logger, uid=1001)

    of_one = [line for line in seen if line["detail"]["uid"] == 1000]
    assert BURST <= len(of_one) < 100
    assert [line["detail"]["uid"] for line in seen if line["detail"]["uid"] != 1000] == [1001]


@pytest.mark.parametrize("kind", [EventKind.JOINED, EventKind.LEFT])
def test_a_process_that_comes_and_goes_in_a_loop_never_fills_the_log(logger, monkeypatch, kind):
    told = []
    limited(logger, monkeypatch, 0.2, told)

    for pid in [200] * 1000 + [201]:  # 200 s
        came_and_went(logger, kind, pid)

    pids = [event.detail["pid"] for event in told]
    assert BURST <= pids.count(200) <= BURST + 21
    assert pids[-1] == 201


def test_a_process_that_is_one_user_after_another_never_takes_memory_without_end(logger, monkeypatch):
    limiter = limited(logger, monkeypatch, 0.01, [])

    for uid in range(10 * MOST_SHARES):
        refused(logger, uid=uid)

    assert len(limiter._shares) <= 2 * MOST_SHARES


def test_processes_that_come_and_go_once_never_take_memory_without_end(logger, monkeypatch):
    limiter = limited(logger, monkeypatch, 0.01, [])

    for pid in range(10 * MOST_SHARES):
        for kind in (EventKind.JOINED, EventKind.LEFT):
            came_and_went(logger, kind, pid)

    assert len(limiter._shares) <= 2 * MOST_SHARES
