"""Writes the C source of the cffi extension: `build.py greedy.h OUT`. Meson calls it. Nothing imports it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI


def main() -> int:
    header = re.sub(r"^#include.*$", "", Path(sys.argv[1]).read_text(), flags=re.MULTILINE)
    ffi = FFI()
    ffi.cdef(header)
    ffi.set_source("valved.policy._greedy", '#include "greedy.h"')
    ffi.emit_c_code(sys.argv[2])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
