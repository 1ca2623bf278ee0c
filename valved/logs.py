"""Structured logs: one JSON object per line on standard error, an event name plus its facts."""

from __future__ import annotations

import json
import logging
import sys
import time

from valved.model.events import Event

CLIENT_FACTS = ("path", "error")  # of the API client, which valved shares with the scheduler


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        event = getattr(record, "event", None)
        if isinstance(event, Event):
            line.update({name: value for name, value in event.as_record().items() if value and name != "kind"})
        line.update(getattr(record, "facts", {}))
        line.update({name: getattr(record, name) for name in CLIENT_FACTS if hasattr(record, name)})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("valved").setLevel(level.upper())
