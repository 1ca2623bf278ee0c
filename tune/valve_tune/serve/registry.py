"""Where the jobs of this user are: one small file per folder, so that `ls` finds them and a name is enough."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from valve_tune.serve.folder import FolderError, JobFolder, replace_file


def home() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "valve" / "tune"


def remember(folder: JobFolder) -> None:
    name = hashlib.sha256(str(folder.path).encode()).hexdigest()[:16]
    home().mkdir(parents=True, exist_ok=True)
    replace_file(home() / name, f"{folder.path}\n")


def known() -> list[JobFolder]:
    """Folders that still hold a job; others are forgotten."""
    found = []
    for entry in sorted(home().glob("[!.]*")) if home().is_dir() else ():  # hidden: one that is being written
        folder = JobFolder(entry.read_text(encoding="utf-8").strip())
        if folder.exists():
            found.append(folder)
        else:
            entry.unlink(missing_ok=True)
    return found


def find(job: str) -> JobFolder:
    """By path, or by the name of its folder where only one has it."""
    here = JobFolder(job)
    if here.exists():
        return here
    named = [folder for folder in known() if folder.path.name == job]
    if len(named) == 1:
        return named[0]
    if named:
        raise FolderError(f"{job}: {len(named)} jobs have this name: {', '.join(str(each.path) for each in named)}")
    raise FolderError(f"{job}: no such job; valve tune ls shows all jobs")
