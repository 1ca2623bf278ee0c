"""Print what `make venv` installs: build, run-time and development requirements, all read from pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pip carries a reader for the one interpreter that has none
    from pip._vendor import tomli as tomllib


def main() -> None:
    project = tomllib.loads(Path(__file__).resolve().parents[2].joinpath("pyproject.toml").read_text())
    optional = project["project"]["optional-dependencies"]
    for requirement in [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *optional["dev"],
    ]:
        print(requirement)


if __name__ == "__main__":
    main()
