"""The chart's images, made of what is installed on this machine: what the Dockerfile would copy, without a registry.

Everything lies under its own path, so that scripts and libraries find each other as they do here. In the place of the
driver's libraries, which a node's runtime would mount, the environment names those of the emulated GPU, and these alone
are taken from valve-tools.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from valve_tools.cluster import image
from valve_tools.emulator import node as emulated

# Of the standard library; nothing of ours imports them.
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "tkinter", "turtledemo"}
NEVER_IMPORTED = {"kubernetes"}  # reads kubeconfigs, so never inside a cluster; what it needs is needed


def write_valve(path: Path, name: str, emulator: Path) -> None:
    """Valve's one image, whose processes find the emulated GPU whose server's folder is `emulator`."""
    files = {str(file): file for file in (*contents(), *emulated.LIBRARIES.iterdir())}
    variables = emulated.environment(emulator, {})
    variables |= {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    image.write(path, name, files, folders=["/tmp", "/etc"], env=[f"{key}={value}" for key, value in variables.items()])


def contents() -> list[Path]:
    """Interpreter, standard library, Valve and what it needs, and every library that those load."""
    interpreter = [path for path in Path(sys.prefix, "bin").iterdir() if path.name.startswith(("python", "valve"))]
    found = [*interpreter, *_files_in(Path(sysconfig.get_path("stdlib")))]
    marker = Path(sys.prefix, "pyvenv.cfg")
    found += [marker, Path(sys._base_executable)] if marker.exists() else []  # type: ignore[attr-defined]
    for name, package in _with_needs("valve").items():
        if name in NEVER_IMPORTED:
            continue
        found += [Path(str(package.locate_file(file))).resolve() for file in package.files or []]
    found = [path for path in found if path.is_file() and "tests" not in path.parts]
    loaded = _libraries([path for path in found if ".so" in path.name or path.name.startswith("python")])

    linked = [behind for path in (*found, *loaded) for behind in _links(path)]

    return list(dict.fromkeys([*found, *loaded, *linked]))


def _links(path: Path) -> Iterator[Path]:
    """What a link leads to, hop by hop."""
    while path.is_symlink():
        path = path.parent / path.readlink()
        yield path


def _files_in(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and path.name not in LEFT_OUT and not path.name.startswith("config-"):
            yield from _files_in(path)
        elif path.is_file():
            yield path


def _with_needs(name: str) -> dict[str, Distribution]:
    """A package and all that it needs, extras left out; what is not installed is not needed here."""
    found: dict[str, Distribution] = {}
    wanted = [name]
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        for line in found[name].requires or []:
            if "extra ==" not in line:
                wanted.append(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0])

    return found


def _libraries(programs: list[Path]) -> list[Path]:
    told = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False).stdout
    paths = re.findall(r"(?:=> )?(/\S+) \(0x", told)

    return [Path(path) for path in dict.fromkeys(paths)]
