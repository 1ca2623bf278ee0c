"""Checkpoints, whole or absent: written aside, forced to disk, renamed; read only if each file is what was written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

MANIFEST = "manifest.json"
NAME = re.compile(r"checkpoint-(\d+)")
ASIDE = ".writing-"
DAMAGED = "damaged-"


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """A write that fails names no file; whoever reads of the full disk must know which one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_file(path: Path, content: bytes) -> None:
    """The whole file or the old one, also after a power cut."""
    aside = path.with_name(f"{ASIDE}{path.name}")
    try:
        _forced(aside, content)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    _force_folder(path.parent)


def _forced(path: Path, content: bytes) -> None:
    with named(path), open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _force_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(out: Path, step: int, files: Mapping[str, bytes], limit: int) -> Path:
    """Write checkpoint-`step` and remove all but the newest `limit` up to it. An older one of that name is replaced."""
    aside, target = out / f"{ASIDE}{step}", out / f"checkpoint-{step}"
    checksums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    everything = {**files, MANIFEST: json.dumps(checksums, indent=1, sort_keys=True).encode()}
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        for name, content in everything.items():
            _forced(aside / name, content)
        _force_folder(aside)
        _put(aside, target)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _force_folder(out)
    # Those of later steps are damaged, or of a run that went on elsewhere: they count for nothing here.
    for old, _ in [each for each in found(out) if each[0] <= step][limit:]:
        shutil.rmtree(out / f"checkpoint-{old}", ignore_errors=True)
    return target


def _put(aside: Path, target: Path) -> None:
    """A folder cannot be renamed over a full one: the old one goes aside first, and `found` skips what is there."""
    old = target.with_name(f"{ASIDE}old-{target.name}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(aside, target)
    shutil.rmtree(old, ignore_errors=True)


def found(out: Path) -> list[tuple[int, Path]]:
    """Checkpoints by name, newest first, whole or not."""
    if not out.is_dir():
        return []
    named = [(match, path) for path in out.iterdir() if (match := NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted(((int(match[1]), path) for match, path in named), reverse=True)


def sums(folder: Path) -> dict[str, str]:
    """The checksum of each file as it was written. OSError or ValueError: nobody knows."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except RecursionError:
        found = None
    if not isinstance(found, dict) or not found:  # of no file would be whole without any
        raise ValueError(f"{folder / MANIFEST}: holds no checksums")
    return found


def fault(folder: Path) -> str:
    """What is wrong with a checkpoint; empty if it is whole."""
    try:
        for name, right in sums(folder).items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != right:
                return f"{name} is not what was written"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def newest(out: Path) -> tuple[Path | None, list[str]]:
    """(newest whole checkpoint, what was wrong with newer ones). An old one put aside by an unfinished replacement
    is taken back.
    """
    for old in sorted(out.glob(f"{ASIDE}old-checkpoint-*")) if out.is_dir() else []:
        target = out / old.name[len(f"{ASIDE}old-") :]
        if not target.exists():
            os.rename(old, target)
    faults: list[str] = []
    for _, folder in found(out):
        wrong = fault(folder)
        if not wrong:
            return folder, faults
        faults.append(f"{folder.name}: {wrong}")
    return None, faults


def put_damaged_aside(out: Path) -> None:
    """What is newer than the newest whole checkpoint gets a name that nothing reads; its owner may still look at it."""
    for _, folder in found(out):
        if not fault(folder):
            return
        target = folder.with_name(f"{DAMAGED}{folder.name}")
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rename(folder, target)


def sweep(out: Path) -> None:
    """Remove what an interrupted write has left."""
    for rest in out.glob(f"{ASIDE}*") if out.is_dir() else []:
        if rest.is_dir():
            shutil.rmtree(rest, ignore_errors=True)
        else:
            rest.unlink(missing_ok=True)
