"""Looks at a running emulated node and changes it: `tools/emulator/ctl [--dir D] COMMAND`.

get                     every knob
set NAME=VALUE...       change knobs: rpc_us=50 costs=a100 lock=device-only
state                   channels, clients, memory, gates, as JSON
spent PID               how long a process stood in the driver, by kind of call
tell PID [NAME=VALUE..] the settings of a process's libcuda; with values, changes them
fault RULE | release    add a fault rule (README.md); let go the calls that stand at a hold
lose GPU                the card falls off the bus
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from valve_tools.emulator.client import Emulator, EmulatorError


def pairs(words: Sequence[str]) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise EmulatorError(f"{word}: expected name=value, for example rpc_us=50")
    return dict(word.split("=", 1) for word in words)


def spent_table(emulator: Emulator, pid: int) -> str:
    rows = [f"{'call':<14}{'count':>9}{'model ms':>12}{'wall ms':>12}"]
    for kind, spent in emulator.process(pid).spent().items():
        if spent.count:
            rows.append(f"{kind:<14}{spent.count:>9}{spent.model_ns / 1e6:>12.3f}{spent.wall_ns / 1e6:>12.3f}")
    return "\n".join(rows)


def carry_out(emulator: Emulator, command: str, words: Sequence[str]) -> str:
    if command == "get":
        return json.dumps(emulator.knobs(), indent=2)
    if command == "state":
        return json.dumps(emulator.state().raw)
    if command == "spent" and len(words) == 1:
        return spent_table(emulator, int(words[0]))
    if command == "tell" and words:
        page = emulator.process(int(words[0]))
        page.set(**{name: int(value, 0) for name, value in pairs(words[1:]).items()})
        return json.dumps(page.settings(), indent=2)
    if command == "set" and words:
        emulator.set(**pairs(words))
    elif command == "fault" and words:
        emulator.fault(" ".join(words))
    elif command == "release":
        emulator.release()
    elif command == "lose" and len(words) == 1:
        emulator.lose(int(words[0]))
    else:
        raise EmulatorError(f"{command} {' '.join(words)}: no such command; see --help")
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/emulator/ctl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir",
        default=os.environ.get("VALVE_EMU_DIR"),
        help="The folder of the node. Default: VALVE_EMU_DIR of the environment.",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="The command and its words. The list stands above.")
    options = parser.parse_args(arguments)
    if not options.dir or not options.command:
        parser.error("say which node (--dir or VALVE_EMU_DIR) and what to do")
    try:
        with Emulator(options.dir) as emulator:
            text = carry_out(emulator, options.command[0], options.command[1:])
    except (EmulatorError, OSError, ValueError) as error:
        print(f"tools/emulator/ctl: {error}", file=sys.stderr)
        return 1
    print(text, end="\n" if text else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
