"""Records what a real Envoy says to the endpoint picker, and its answers: `record_exchanges.py` writes exchanges.jsonl.

Run it after a change of the picker's answers, and read the difference. test_exchange.py plays the record back.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

# ruff: noqa: E402
sys.path[:0] = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parent)]

from rooms import ROOMS

sys.path[:0] = map(str, ROOMS)

from exchange_record import PORT, readable
from test_picker import picked
from valve_router import picker
from valve_router.exchange import Exchange

RECORD = Path(__file__).with_name("exchanges.jsonl")
DUPLEX = {"asked": "FULL_DUPLEX_STREAMED", "answered": "FULL_DUPLEX_STREAMED"}
STREAMED = {"prompt": "hello", "max_tokens": 2, "stream": True}
CASES = {
    "streamed": (DUPLEX, STREAMED, ()),
    "whole": (DUPLEX, {"prompt": "hello"}, ()),
    "no body": (DUPLEX, None, ()),
    "buffered": ({"asked": "BUFFERED", "answered": "STREAMED"}, STREAMED, ()),
    "piece by piece": ({"asked": "STREAMED", "answered": "STREAMED"}, STREAMED, ()),
    "headers alone": ({"asked": "NONE", "answered": "NONE"}, STREAMED, ()),
    "the first is dead": (DUPLEX, STREAMED, (0,)),
    "all are dead": (DUPLEX, STREAMED, (0, 1)),
    "subset": ({**DUPLEX, "subset": 1}, STREAMED, ()),
    "empty subset": ({**DUPLEX, "subset": None}, STREAMED, ()),
    "refused by the engine": (DUPLEX, {"prompt": "hello", "status": 422}, ()),
}


class Recorded(Exchange):
    messages: list[dict[str, object]]

    def on(self, message):
        answers = super().on(message)
        self.messages.append({"message": readable(message), "answers": [readable(one) for one in answers]})
        return answers


async def record(folder, name):
    gate, body, dead = CASES[name]
    Recorded.messages = found = []

    def by_ports(ports):
        if "subset" not in gate:
            return gate
        return {**gate, "subset": [] if gate["subset"] is None else [f"127.0.0.1:{ports[gate['subset']]}"]}

    with mock.patch.object(picker, "Exchange", Recorded):
        async with picked(folder, gate=by_ports, health_s=3600.0) as there:
            ports = [str(port) for port in there.engines.ports]
            for index in dead:
                there.engines.processes[index].kill()
                there.engines.processes[index].wait()
            url = f"{there.url}/v1/{'models' if body is None else 'completions'}"
            async with there.client.request("GET" if body is None else "POST", url, json=body) as answer:
                await answer.read()
            status = await there.until_quiet()
    text = json.dumps({"said": found, "counted": status["requests"], "retries": status["retries"]})
    for index, port in enumerate(ports):
        text = text.replace(port, str(PORT + index))
    return json.loads(text)


def main():
    with tempfile.TemporaryDirectory() as folder:
        record_of = {name: asyncio.run(record(folder, name)) for name in CASES}
    lines = []
    for name, found in record_of.items():
        said = found.pop("said")
        lines.append(json.dumps({"case": name, **found}))
        lines += [json.dumps(one, sort_keys=True) for one in said]
    RECORD.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
