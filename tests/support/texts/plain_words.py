"""What Python writes of its own values, found in what people read: every event and line of a log of this process."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from valved.model.events import Event
from valved.state.journal import Journal

_PYTHON = re.compile(
    r"\b(?:None|True|False)\b"
    r"|[(\[{]b?['\"]|['\"],?[)\]}]"  # ('user', 0), ['x'], {'a': 1}
    r"|\(\d+,\)"
    r"|\bb'"
    r"|<[\w.]+: |<[\w.]+ object"  # <Role.ONLINE: 1>
    r"|\b[A-Z][a-z]\w*\.[A-Z][A-Z_]+\b"  # Role.ONLINE
    r"|\b[A-Z]\w*\(\w+="  # Account(kind=
    r"|\b(?:frozenset|set|dict|deque|array|\w*Path|\w*Error|\w*Exception)\("
)
_TELL = ("valved", "valve_kube", "valve_scheduler", "valve_router")
_STANDARD = {*vars(logging.makeLogRecord({})), "event", "message", "asctime"}  # an event is judged when it is told


def python_in(text: str) -> list[str]:
    return _PYTHON.findall(text)


def texts_of(value: Any) -> Iterator[str]:
    """As a log line has them: what JSON does not know is written as Python would."""
    if isinstance(value, dict):
        for one in value.values():
            yield from texts_of(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from texts_of(one)
    elif value is not None and not isinstance(value, (bool, int, float)):
        yield str(value)


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        for name in _TELL:
            logging.getLogger(name).addHandler(self)
        pass_on = Journal._pass_on

        def judged(journal: Journal, event: Event) -> Event:
            self.judge(event)
            return pass_on(journal, event)

        Journal._pass_on = judged  # type: ignore[method-assign]

    def judge(self, event: Event) -> None:
        """What a reader of events is shown: the reason, and details that are texts and whole numbers, nothing else."""
        for one in (event.reason, *event.detail.values()):
            if type(one) not in (str, int) or (isinstance(one, str) and python_in(one)):
                self.wrong.append(f"{event.kind.value}: {one!r}")

    def emit(self, record: logging.LogRecord) -> None:
        bound = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        texts = [record.getMessage(), *texts_of(bound)]  # a traceback is for whoever mends Valve
        self.wrong += [f"log: {one}" for one in texts if python_in(one)]


@pytest.fixture(scope="session")
def everything_told() -> Told:
    return Told()


@pytest.fixture(autouse=True)
def people_never_read_python(everything_told: Told) -> Iterator[None]:
    """An operator reads sentences."""
    everything_told.wrong.clear()
    yield
    if everything_told.wrong:
        pytest.fail("\n".join(everything_told.wrong), pytrace=False)
