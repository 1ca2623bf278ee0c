"""The preload libraries on the node, where containers mount them: SHIM/VERSION/, and `current` that points to one.

Never written in place: a process that has the old file mapped would die of it. An old version goes when nobody maps it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from valved import paths
from valved.fds import names_in, read_if_there

log = logging.getLogger("valved.kube")

CURRENT = "current"
LIBRARIES = ("libvalve.so", "libvalve-cuda.so")
LOADER_LIST = "ld.so.preload"  # for offline containers: what the loader preloads whatever their environment says


def bring(folder: Path, version: str) -> None:
    """Install this release's libraries and remove old ones. A full or read-only disk must not stop the rest: without
    the files nothing is injected, and that is safe."""
    try:
        home = install(paths.preload_library().parent, folder, version)
        old = remove_unused(folder)
        log.info("shim installed", extra={"facts": {"folder": str(home), "removed": ",".join(old)}})
    except OSError as error:
        log.error("shim not installed", extra={"facts": {"folder": str(folder), "error": str(error)}})


def install(source: Path, folder: Path, version: str) -> Path:
    """Put the libraries of `source` there and make them current; returns their folder. Twice is once."""
    digest = hashlib.sha256(b"".join((source / name).read_bytes() for name in LIBRARIES)).hexdigest()[:12]
    home = folder / f"{version}-{digest}"
    if not home.is_dir():
        fresh = folder / f".{home.name}.{os.getpid()}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        fresh.chmod(0o755)
        for name in LIBRARIES:
            shutil.copyfile(source / name, fresh / name)
            (fresh / name).chmod(0o755)
        with contextlib.suppress(OSError):  # a twin was faster: then it is there
            fresh.rename(home)
        shutil.rmtree(fresh, ignore_errors=True)
    link = folder / f".{CURRENT}.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(home.name)
    link.replace(folder / CURRENT)
    _write_loader_list(folder)
    return home


def _write_loader_list(folder: Path) -> None:
    """Only when it says something else: containers have this very file mounted."""
    path, text = folder / LOADER_LIST, f"{folder / CURRENT / LIBRARIES[0]}\n"
    if not path.is_file() or path.read_text() != text:
        fresh = folder / f".{LOADER_LIST}.{os.getpid()}"
        fresh.write_text(text)
        fresh.chmod(0o644)
        fresh.replace(path)


def remove_unused(folder: Path, processes: Path = Path("/proc")) -> list[str]:
    """Versions that are not current and that no process maps: none where some process cannot be asked. Containers that
    start later mount the folder anew."""
    current = os.readlink(folder / CURRENT) if (folder / CURRENT).is_symlink() else ""
    versions = {path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink()}
    old = versions - {current}
    try:
        old -= _mapped(folder, processes) if old else set()
    except OSError as error:
        log.warning("old shims kept", extra={"facts": {"kept": ",".join(sorted(old)), "error": str(error)}})
        return []
    for name in old:
        shutil.rmtree(folder / name, ignore_errors=True)
    return sorted(old)


def _mapped(folder: Path, processes: Path) -> set[str]:
    """Versions of which some process has a library mapped. Containers may see the folder under any path."""
    pattern = re.compile(rf"/{re.escape(folder.name)}/([^/\s]+)/libvalve(?:-cuda)?\.so")
    return {version for text in _maps(processes) for version in pattern.findall(text)}


def _maps(processes: Path) -> Iterable[str]:
    for name in filter(str.isdecimal, names_in(processes)):
        if (text := read_if_there(processes / name / "maps")) is not None:
            yield text.decode(errors="replace")
