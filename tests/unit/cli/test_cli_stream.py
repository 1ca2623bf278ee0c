"""How the stream of events is left."""

import threading
from types import SimpleNamespace

import grpc

from valved.cli import stream


def test_who_ends_following_never_waits_for_a_question_that_is_asked_just_then(monkeypatch):
    """A valved that hangs answers none of them."""
    about_to_ask, is_waited_for, is_cancelled = (threading.Event() for _ in range(3))

    class Looker(threading.Thread):
        def join(self, timeout=None):
            is_waited_for.set()
            super().join(timeout)

    class Call:
        def exception(self):
            is_cancelled.wait(100.0)
            raise grpc.FutureCancelledError

        def cancel(self):
            is_cancelled.set()

    def ask(*_, **__):
        about_to_ask.set()
        is_waited_for.wait()
        return Call()

    monkeypatch.setattr(threading, "Thread", Looker)
    monkeypatch.setattr(stream, "LOOK_S", 0.0)
    node = SimpleNamespace(stub=SimpleNamespace(GetPolicy=SimpleNamespace(future=ask)))
    with stream.EventStream(node, [])._asked_meanwhile():
        about_to_ask.wait()

    assert is_cancelled.is_set()
