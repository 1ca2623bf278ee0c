"""How the stream of events is left, and how a command ends that valved does not answer."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from valved.cli import stream
from valved.cli.client import DEADLINE_S, explain_error

MANUAL = Path(__file__).resolve().parents[3] / "docs/cli.md"


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


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, f"does not answer within {DEADLINE_S:g} s"),
        (grpc.StatusCode.UNAVAILABLE, "no valved runs"),
    ],
)
def test_no_exit_code_of_a_command_that_is_not_answered_is_missing_in_the_manual(tmp_path, code, words):
    """The table named no code for a valved that hangs, and one for "no valved answers" that it does not get."""
    error = SimpleNamespace(code=lambda: code, trailing_metadata=lambda: (), details=lambda: "")
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", MANUAL.read_text(), re.MULTILINE))

    assert words in rows[str(explain_error(error, tmp_path).code)]
