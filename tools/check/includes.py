"""The rooms' rule for C: what each folder may include from the project (CONTRIBUTING.md).

proto/abi sees itself alone; the shim and the native gate see proto/abi alone; the emulator may see proto/abi. No room
includes another room's headers. Inside the shim, a room's header is its own but for those in SHARED_IN_SHIM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from valve_tools.check.tree import ROOT, tracked

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
ROOMS = (
    "shim",
    "valved/native",
    "valved/cells",
    "valved/policy",
    "tools/emulator/cuda",
    "tools/emulator",
    "tools/demo",
    "tools/sim",
    "tools/gpu",
)
SHIM = "shim/src/"
SHARED_IN_SHIM = {
    "hooks/hooks.h": {""},  # the shim's own folder: shim.h shows it to all
    "link/packet.h": {""},
    "link/ownfd.h": {"", "channels"},  # no hook may close our own descriptors
    "activity/contexts.h": {"kv"},  # a KV range lives in a context
}
"""Header of a room in the shim: the other rooms of the shim that may include it."""


def room_of(name: str) -> str:
    return next((room for room in ROOMS if name.startswith(room + "/")), name.split("/", maxsplit=1)[0])


def findings() -> list[str]:
    headers = {path.relative_to(ROOT).as_posix() for path in tracked(".h")}
    return list(_violations(headers))


def _violations(headers: set[str]) -> Iterator[str]:
    abi = {name.removeprefix("proto/abi/") for name in headers if name.startswith("proto/abi/")}
    for path in tracked(".c", ".h", ".S"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("tests/"):
            continue
        for wanted in INCLUDE.findall(path.read_text()):
            if wanted not in abi and not _same_room(name, wanted, headers):
                yield f'{name}: "{wanted}" is neither in proto/abi nor in its own room'
            elif name.startswith(SHIM) and wanted not in abi and not _may_see_in_shim(name, wanted, headers):
                yield f'{name}: "{wanted}" belongs to another room of the shim'


def _same_room(name: str, wanted: str, headers: set[str]) -> bool:
    base = wanted.rsplit("/", 1)[-1]
    own = room_of(name)
    emulator = own.startswith("tools/emulator")
    rooms = {own, "tools/emulator"} if emulator else {own}
    return any(header.rsplit("/", 1)[-1] == base and room_of(header) in rooms for header in headers)


def _may_see_in_shim(name: str, wanted: str, headers: set[str]) -> bool:
    own = name.removeprefix(SHIM).rpartition("/")[0]
    found = next(header for header in headers if header.startswith(SHIM) and header.endswith("/" + wanted))
    inner = found.removeprefix(SHIM)
    room = inner.rpartition("/")[0]
    return room in {"", own} or own in SHARED_IN_SHIM.get(inner, set())
