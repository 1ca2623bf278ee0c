"""Frozen weights in shared memory on CPU: one copy for an engine and its trainer, mapped read-only by the trainer.

Tensors may be fused as engines fuse them; the trainer's are views of them. On a card the engines' weight daemons do
this (base/daemon.py).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import warnings
from pathlib import Path

import torch

from valve_tune.base.consent import FREE, MAGIC, Permit
from valve_tune.base.views import Sizes, as_checkpoint
from valve_tune.base.weights import BadBase, BaseChanged, StillWeights, Tensors, digest_of, layers_in, split

ALIGNED = 64
TYPES = {str(each): each for each in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


def publish(tensors: Tensors, path: Path) -> str:
    """Lay the tensors out in one file, for example under /dev/shm, and return the checksum of their bytes."""
    entries: dict[str, tuple[str, list[int], int, int]] = {}
    end = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        length = tensor.numel() * tensor.element_size()
        entries[name] = (str(tensor.dtype), list(tensor.shape), end, length)
        end = -(-(end + length) // ALIGNED) * ALIGNED
    body = bytearray(end)
    for name, (_, _, start, length) in entries.items():
        body[start : start + length] = tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    checksum = hashlib.sha256(body).hexdigest()
    header = json.dumps({"tensors": entries, "checksum": checksum}).encode()
    header += b" " * (-(len(MAGIC) + 8 + len(header)) % ALIGNED)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    # Its owner's processes alone may map it: a user without the right to see the service may not see its weights.
    try:
        with open(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.writelines((MAGIC, struct.pack("<Q", len(header)), header, body))
        os.replace(aside, path)
    finally:  # what did not fit is memory, where the file is in /dev/shm
        aside.unlink(missing_ok=True)
    return checksum


class SharedFile:
    """A mapping of what was published. The kernel refuses writes; a checksum shows writes of others."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header, self._start = self._header()
        self._checksum = str(header["checksum"])
        self.check()
        self.tensors = {name: self._view(*entry) for name, entry in header["tensors"].items()}

    def _header(self) -> tuple[dict[str, dict[str, tuple[str, list[int], int, int]]], int]:
        if self._map[: len(MAGIC)] != MAGIC:
            raise BadBase(f"{self._path}: no shared weights")
        (length,) = struct.unpack_from("<Q", self._map, len(MAGIC))
        start = len(MAGIC) + 8
        try:
            return json.loads(self._map[start : start + length]), start + length
        except ValueError as error:
            raise BadBase(f"{self._path}: {error}") from error

    def _view(self, kind: str, size: list[int], start: int, length: int) -> torch.Tensor:
        dtype = TYPES[kind]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the buffer cannot be written is the point
            flat = torch.frombuffer(self._map, dtype=dtype, offset=self._start + start, count=length // dtype.itemsize)
        return flat.view(size)

    def check(self) -> None:
        with memoryview(self._map) as whole:
            now = hashlib.sha256(whole[self._start :]).hexdigest()
        if now != self._checksum:
            raise BaseChanged(f"{self._path}: the shared weights changed while the job ran")


class SharedCopy(StillWeights):
    """The base of a job, as views of a shared file."""

    def __init__(self, path: Path, sizes: Sizes, permit: Permit = FREE) -> None:
        self._file, self._permit = SharedFile(path), permit
        self.tensors = as_checkpoint(self._file.tensors, sizes)
        self.digest = digest_of(self.tensors)
        outer, self._layers = split(self.tensors, layers_in(sizes))
        self.outer: Tensors = outer

    def check(self) -> None:
        self._file.check()

    def permitted(self) -> None:
        self._permit.check()


def adopt(module: torch.nn.Module, path: Path) -> SharedFile:
    """A service on the CPU computes with the file's weights from now on; its own copy is free. It must be of that base,
    and keep what it gets for as long as it serves.
    """
    file = SharedFile(path)
    for name, parameter in module.named_parameters():
        there = file.tensors.get(name)
        if there is None or there.dtype != parameter.dtype or not torch.equal(there, parameter):
            raise BadBase(f"{path}: holds no {name} as this model has it")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False).data = file.tensors[name]
    return file
