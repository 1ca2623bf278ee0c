"""Messages of ext-proc as a person reads them: bytes as text, and no header that no picker reads."""

from __future__ import annotations

import base64
import json

from google.protobuf.json_format import MessageToDict, ParseDict

PORT = 18_000  # of the first replica, in a record
KEPT = (":path", ":method", ":status", "content-type", "retry-after")
BYTES = ("rawValue", "body")


def readable(message):
    found = MessageToDict(message)
    for kind in ("requestHeaders", "responseHeaders"):
        headers = found.get(kind, {}).get("headers", {}).get("headers")
        if headers is not None:
            headers[:] = [one for one in headers if one["key"] in KEPT]
    return walked(found, lambda text: base64.b64decode(text).decode())


def parsed(kind, found):
    return ParseDict(walked(found, lambda text: base64.b64encode(text.encode()).decode()), kind())


def walked(found, change):
    if isinstance(found, list):
        return [walked(one, change) for one in found]
    if not isinstance(found, dict):
        return found
    return {
        key: change(value) if key in BYTES and isinstance(value, str) else walked(value, change)
        for key, value in found.items()
    }


def cases(path):
    """By name: what was said, and what was counted."""
    found = {}
    for line in path.read_text().splitlines():
        one = json.loads(line)
        if "case" in one:
            said = []
            found[one["case"]] = (said, one)
        else:
            said.append(one)
    return found
