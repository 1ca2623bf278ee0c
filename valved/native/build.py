"""Write the C of a cffi extension: `build.py NAME.h OUT` for _NAME. Called by meson."""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI


def main() -> int:
    header, out = Path(sys.argv[1]), sys.argv[2]
    lines = header.read_text().splitlines()
    ffi = FFI()
    ffi.cdef("\n".join(line for line in lines if not line.startswith("#")))
    ffi.set_source(f"valved.native._{header.stem}", f'#include "{header.name}"')
    ffi.emit_c_code(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
