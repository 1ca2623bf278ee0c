"""Lay the hook out in a folder: `python -m valve_hook.export FOLDER`, then PYTHONPATH=FOLDER in front of an engine.

So an unchanged image gets the plugin by a mount and one variable, and the engine's own packages are not shadowed: the
folder holds this package, `valve_abi` and the dist-info that names the entry points, and nothing else. Done again it
changes nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import valve_abi
from valve_hook import VERSION

ENTRY_POINTS = """\
[vllm.general_plugins]
valve = valve_hook.vllm.plugin:register

[sglang.srt.plugins]
valve = valve_hook.sglang.plugin:register
"""
METADATA = f"Metadata-Version: 2.1\nName: valve-hook\nVersion: {VERSION}\n"


def export(folder: Path) -> Path:
    """Write what differs; a reader beside us never sees half a file."""
    packages = Path(__file__).resolve().parent, Path(valve_abi.__file__).resolve().parent
    wanted = {
        f"{package.name}/{path.relative_to(package)}": path.read_bytes()
        for package in packages
        for path in package.rglob("*.py")
    }
    info = f"valve_hook-{VERSION}.dist-info"
    wanted |= {f"{info}/METADATA": METADATA.encode(), f"{info}/entry_points.txt": ENTRY_POINTS.encode()}
    for name, content in wanted.items():
        target = folder / name
        if target.is_file() and target.read_bytes() == content:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(draft, 0o644)
        os.replace(draft, target)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m valve_hook.export", description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="Lay the plugin out in this folder, made where it is missing.")
    print(export(Path(parser.parse_args().folder).resolve()))
