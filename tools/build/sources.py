"""List what a wheel installs as plain files: `destination folder|source` lines, read by its meson.build.

The folder names of the tree and the import names differ on purpose (DECISIONS.md, packages): `tools` and `proto`
would collide with other distributions in a shared environment.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "product": {
        "valved": "valved",
        "scheduler/valve_kube": "valve_kube",
        "scheduler/valve_scheduler": "valve_scheduler",
        "scheduler/valve_router": "valve_router",
        "patches/hook": "valve_hook",
        "patches/vllm": "valve_hook/vllm",
        "patches/sglang": "valve_hook/sglang",
        "patches/tensorrt_llm": "valve_hook/tensorrt_llm",
        "proto/valve": "valve",
        "proto/valve_abi": "valve_abi",
    },
    "tools": {"tools": "valve_tools"},
}
BUILDS = {"product": ROOT, "tools": ROOT / "tools"}  # where the meson.build of each wheel stands
DATA = {".py", ".pyi", ".typed", ".json", ".html", ".css", ".csv", ".toml", ".service", ".yaml"}


def main() -> None:
    wheel = sys.argv[1]
    for folder, package in PACKAGES[wheel].items():
        base = ROOT / folder
        for path in sorted(base.rglob("*")):
            wanted = path.suffix in DATA and path.name != "pyproject.toml"
            if path.is_file() and wanted and "__pycache__" not in path.parts:
                destination = Path(package, path.parent.relative_to(base))
                print(f"{destination.as_posix()}|{path.relative_to(BUILDS[wheel]).as_posix()}")


if __name__ == "__main__":
    main()
