#!/usr/bin/env python3
"""The one-word driver change: let FIFO_DISABLE_CHANNELS take the lock of its own GPU instead of every GPU's.

    driver_patch.py show   TREE      which word is there, and what it means
    driver_patch.py apply  TREE      change it (writes one file, keeps everything else)
    driver_patch.py revert TREE      put it back
    driver_patch.py verify TREE      exit 0 when the tree is patched, 1 when stock, 2 when neither

TREE is a checkout of open-gpu-kernel-modules. The word is found by method id, never by line number. Standard library
only: it runs on a build machine where nothing of Valve is installed.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

FILE = Path("src/nvidia/generated/g_subdevice_nvoc.c")
METHOD_ID = 0x2080110B
FUNCTION = "subdeviceCtrlCmdFifoDisableChannels"
# A neighbour that carries the very word we write, in every branch: FIFO_GET_PHYSICAL_CHANNEL_COUNT.
NEIGHBOUR_ID = 0x20801108

PATCHED, STOCK, UNKNOWN = 0, 1, 2


@dataclass(frozen=True)
class Numbering:
    """Flag bits changed their values between branches 550 and 555 (src/nvidia/inc/kernel/rmapi/control.h)."""

    name: str
    stock: frozenset[int]
    device_only: int  # RMCTRL_FLAGS_GPU_LOCK_DEVICE_ONLY


OLD = Numbering("535 to 550", frozenset({0x810}), 0x40)
NEW = Numbering("555 and later", frozenset({0x108, 0x10108}), 0x10)

ENTRY = re.compile(
    r"/\*flags=\*/\s*0x(?P<flags>[0-9a-f]+)u,\s*"
    r"/\*accessRight=\*/\s*0x[0-9a-f]+u,\s*"
    r"/\*methodId=\*/\s*0x(?P<method>[0-9a-f]+)u,"
)


class PatchError(Exception):
    """The tree is not what the patch was written for; the message says how."""


def entries(text: str) -> dict[int, re.Match[str]]:
    """Every exported method of the table by its id. An id that stands twice is a tree we do not understand."""
    found: dict[int, re.Match[str]] = {}
    for match in ENTRY.finditer(text):
        method = int(match["method"], 16)
        if method in found:
            raise PatchError(f"method {method:#x} stands twice in {FILE}")
        found[method] = match
    return found


def our_entry(text: str) -> re.Match[str]:
    match = entries(text).get(METHOD_ID)
    if match is None:
        raise PatchError(f"no method {METHOD_ID:#x} in {FILE}: not a driver this patch knows")
    after = text[match.end() : match.end() + 400]
    if FUNCTION not in after:
        raise PatchError(f"method {METHOD_ID:#x} is not {FUNCTION} here: leave this tree alone")
    return match


def numbering(flags: int) -> Numbering | None:
    """Which numbering a stock or patched word belongs to; None for a word we do not know."""
    for candidate in (OLD, NEW):
        if flags in candidate.stock or flags & ~candidate.device_only in candidate.stock:
            return candidate
    return None


def state(text: str) -> tuple[int, int]:
    """(PATCHED, STOCK or UNKNOWN; the word)."""
    flags = int(our_entry(text)["flags"], 16)
    known = numbering(flags)
    if known is None:
        return UNKNOWN, flags
    return (PATCHED if flags & known.device_only else STOCK), flags


def rewrite(text: str, *, patched: bool) -> str:
    """The text with our one word set or cleared. Nothing else changes."""
    now, flags = state(text)
    known = numbering(flags)
    if known is None:
        raise PatchError(f"unknown word {flags:#x}: write nothing, and tell Valve's maintainers the driver version")
    wanted = flags | known.device_only if patched else flags & ~known.device_only
    if patched and now == STOCK:
        neighbour = entries(text).get(NEIGHBOUR_ID)
        if neighbour is None or int(neighbour["flags"], 16) != wanted:
            raise PatchError(
                f"no neighbouring method uses the word {wanted:#x} in this tree, so it is untested: write nothing"
            )
    start, end = our_entry(text).span("flags")
    return f"{text[:start]}{wanted:x}{text[end:]}"


def describe(text: str) -> str:
    now, flags = state(text)
    words = {PATCHED: "patched: lock of its own GPU", STOCK: "stock: locks every GPU", UNKNOWN: "unknown"}
    known = numbering(flags)
    return f"{FUNCTION} flags {flags:#x} ({words[now]}; flag numbering {known.name if known else 'unknown'})"


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] not in {"show", "apply", "revert", "verify"}:
        print(__doc__, file=sys.stderr)
        return UNKNOWN
    verb, path = argv[0], Path(argv[1]) / FILE
    try:
        text = path.read_text()
        if verb in {"apply", "revert"}:
            text = rewrite(text, patched=verb == "apply")
            path.write_text(text)
        print(describe(text))
        return state(text)[0] if verb == "verify" else 0
    except (PatchError, OSError) as error:
        print(f"driver_patch: {error}", file=sys.stderr)
        return UNKNOWN


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
