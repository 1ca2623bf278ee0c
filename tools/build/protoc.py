"""Run protoc for one file and lay its three outputs flat into a folder (meson wants outputs in one place)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]


def main() -> int:
    include, source, out = (str(Path(argument).resolve()) for argument in sys.argv[1:4])
    with tempfile.TemporaryDirectory() as scratch:
        flags = [f"--{kind}={scratch}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
        status = int(protoc.main(["protoc", f"-I{include}", *flags, source]))
        if status == 0:
            for path in Path(scratch).rglob("*_pb2*"):
                Path(out, path.name).write_bytes(path.read_bytes())
    return status


if __name__ == "__main__":
    raise SystemExit(main())
