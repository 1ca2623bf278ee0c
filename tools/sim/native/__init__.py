"""Loads the C core. Its interface is read from the header it was compiled against, so the two cannot drift apart."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import cffi

FOLDER = Path(__file__).resolve().parent
LIBRARY = "libvalve-sim.so"


@lru_cache(maxsize=1)
def load() -> tuple[Any, Any]:
    """(ffi, library)."""
    library = FOLDER / LIBRARY
    if not library.is_file():
        raise FileNotFoundError(f"{library} is missing: build it with `make build` (or reinstall the wheel)")
    ffi = cffi.FFI()
    header = (FOLDER / "sim.h").read_text(encoding="utf-8")
    ffi.cdef(header.split("/* cdef-begin */")[1].split("/* cdef-end */")[0])
    return ffi, ffi.dlopen(str(library))
