"""Says why the shim cannot be loaded into a program: then nothing could stop that program when a request comes."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import struct
from pathlib import Path

PT_INTERP = 3
LOADERS = 8  # scripts that name scripts; a chain that is longer is no program
HEAD = 1 << 16  # program headers stand at the front of every file that a linker writes


def obstacle(command: str, path: str | None = None, depth: int = 0) -> str:
    """Nothing where the dynamic loader will preload the shim, or where that cannot be known."""
    found = shutil.which(command, path=path)
    if found is None or depth > LOADERS:
        return ""
    try:
        with open(found, "rb") as file:
            head = file.read(HEAD)
            rights = _own_rights(file.fileno())
    except OSError:
        return ""
    name = Path(found).name
    if head.startswith(b"#!"):
        words = head[2:].split(b"\n", 1)[0].decode(errors="replace").split()
        return obstacle(words[0], path, depth + 1) if words else ""
    if head[:6] != b"\x7fELF\x02\x01" or len(head) < 64:
        return ""
    if rights:
        return f"{name} runs with rights of its own ({rights}), and the loader ignores LD_PRELOAD"
    loader = _interpreter(head)
    if not loader:
        return f"{name} is linked statically, and the shim cannot be loaded into it"
    if "musl" in loader:
        return f"{name} uses musl ({loader}), and the shim is built for glibc"
    return ""


def _own_rights(fd: int) -> str:
    """Why the kernel would say AT_SECURE: the ids change, also from root's to a user's, or the file has rights."""
    status = os.fstat(fd)
    if os.fstatvfs(fd).f_flag & os.ST_NOSUID:
        return ""
    if status.st_mode & stat.S_ISUID and status.st_uid != os.getuid():
        return "set-user-id"
    if status.st_mode & stat.S_ISGID and status.st_mode & stat.S_IXGRP and status.st_gid != os.getgid():
        return "set-group-id"
    with contextlib.suppress(OSError):  # it has none
        if os.getuid() != 0 and os.getxattr(fd, "security.capability"):
            return "file capabilities"
    return ""


def _interpreter(head: bytes) -> str:
    """The dynamic loader that a 64-bit little-endian ELF file names."""
    offset, size, count = (*struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54))
    for index in range(count):
        at = offset + index * size
        if at + 56 > len(head):
            return ""
        (kind,) = struct.unpack_from("<I", head, at)
        if kind == PT_INTERP:
            start, length = struct.unpack_from("<Q", head, at + 8)[0], struct.unpack_from("<Q", head, at + 32)[0]
            return head[start : start + length].rstrip(b"\0").decode(errors="replace")
    return ""
