"""List what the wheel installs as plain files: `destination folder|source` lines, read by meson.build.

The folder names of the tree and the import names differ on purpose (DECISIONS.md, packages): `tools` and `proto`
would collide with other distributions in a shared environment.
"""

from __future__ import annotations

from pathlib import Path

PACKAGES = {
    "valved": "valved",
    "scheduler/valve_kube": "valve_kube",
    "scheduler/valve_scheduler": "valve_scheduler",
    "tools": "valve_tools",
    "patches/hook": "valve_hook",
    "patches/vllm": "valve_hook/vllm",
    "patches/sglang": "valve_hook/sglang",
    "patches/tensorrt_llm": "valve_hook/tensorrt_llm",
    "proto/valve": "valve",
    "proto/valve_abi": "valve_abi",
}
DATA = {".py", ".pyi", ".typed", ".json", ".html", ".css", ".csv", ".toml", ".service", ".yaml"}


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    for folder, package in PACKAGES.items():
        base = root / folder
        for path in sorted(base.rglob("*")):
            wanted = path.suffix in DATA or path.name == "py.typed"
            if path.is_file() and wanted and "__pycache__" not in path.parts:
                destination = Path(package, path.parent.relative_to(base))
                print(f"{destination.as_posix()}|{path.relative_to(root).as_posix()}")


if __name__ == "__main__":
    main()
