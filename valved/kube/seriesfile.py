"""Keeps the node's series in a file, so that a daemon that restarts or is upgraded forgets neither hour nor day.

The file is of one boot, since its times are the monotonic clock's, and of one set of GPUs. What cannot be read is never
a reason not to start: the series begins empty then.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from valved.fds import is_scarce
from valved.kube.series import NodeSeries, Saved

log = logging.getLogger("valved.kube")

FILE = "series.npz"


def write(path: Path, saved: Saved, boot: str, gpus: Sequence[str]) -> None:
    """Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with fresh.open("wb") as file:
        np.savez_compressed(file, boot=np.array(boot), gpus=np.array(list(gpus)), **saved)  # type: ignore[arg-type]
    fresh.replace(path)


def keep(path: Path, saved: Saved, boot: str, gpus: Sequence[str]) -> None:
    """Write it if that goes: a full disk must not stop the rest."""
    try:
        write(path, saved, boot, gpus)
    except OSError as error:
        log.warning("series not saved", extra={"facts": {"error": str(error)}})


def read(path: Path, series: NodeSeries, boot: str, gpus: Sequence[str], now_s: float) -> str:
    """Empty: it was taken over. Else why not."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except FileNotFoundError:
        return "there is none"
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, OSError) and is_scarce(error):
            raise  # it may well be there, and would be written over
        return f"unreadable: {error}"
    if str(found.pop("boot", "")) != boot or list(map(str, found.pop("gpus", np.array([])))) != list(gpus):
        return "of another boot or other GPUs"
    return "" if series.restore(found, now_s) else "of another shape or clock"
