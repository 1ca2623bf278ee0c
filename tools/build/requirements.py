"""Print requirements from pyproject.toml: what `make venv` installs, or with an argument that optional group alone."""

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
    usual = [*project["build-system"]["requires"], *project["project"]["dependencies"], *optional["dev"]]
    for requirement in optional[sys.argv[1]] if len(sys.argv) > 1 else usual:
        print(requirement)


if __name__ == "__main__":
    main()
