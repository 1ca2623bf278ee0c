"""Writes the C source of a cffi extension: `build.py HEADER OUT`. Meson calls it. Nothing imports it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI


def main() -> int:
    path = Path(sys.argv[1])
    ffi = FFI()
    ffi.cdef(re.sub(r"^#include.*$", "", path.read_text(), flags=re.MULTILINE))
    ffi.set_source(f"valved.{path.resolve().parent.name}._{path.stem}", f'#include "{path.name}"')
    ffi.emit_c_code(sys.argv[2])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
