"""The frozen weights that an engine's weight daemon holds on a card, mapped into this process: no second copy.

vLLM's daemon (`vllm preload`, for engines with --load-format ipc_cache) and SGLang's (--weight-cache-mode) give CUDA
IPC handles to processes of their user. Each is asked through its engine's own protocol module, so this runs in that
engine's environment. The mapping can be written: a stray write would reach the service. So its owner must have
consented, no view is ever given to an optimizer, and the bytes are looked at before each checkpoint and however the job
ends.

No handle has been opened on a card yet; on a CPU the same calls map shared memory.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from valve_tune.base.consent import NotShared, Permit
from valve_tune.base.processes import start_of
from valve_tune.base.views import Seal, Sizes, as_checkpoint
from valve_tune.base.weights import BadBase, StillWeights, Tensors, digest_of, layers_in, split

WAIT_S = 60.0  # a daemon serves one client after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The base that the job trains on, on the card that it trains on."""

    folder: Path
    config: Any
    dtype: torch.dtype
    device: torch.device


class WeightDaemon:
    """The process at the other end of a socket, which must be one of the service's."""

    def __init__(self, path: Path, is_ours: Callable[[int], bool]) -> None:
        self.path, self._is_ours = path, is_ours
        self.pid, self._start = 0, 0

    def connect(self) -> socket.socket:
        """What comes through it is unpickled: so it is from this user, and from a process of that very service."""
        try:
            info = self.path.lstat()
            if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
                raise NotShared(f"{self.path} is not a socket that this user alone can enter")
        except OSError as error:
            raise NotShared(f"{self.path}: {error}") from None
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(WAIT_S)
        try:
            link.connect(str(self.path))
        except OSError as error:
            link.close()
            raise NotShared(f"{self.path}: {error}") from None
        pid, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        start = start_of(pid)
        if uid != os.geteuid() or start is None or not self._is_ours(pid):
            link.close()
            raise NotShared(f"{self.path} is served by process {pid}, which is not of the service that consents")
        self.pid, self._start = pid, start
        return link

    def check(self) -> None:
        """The memory is the daemon's."""
        if start_of(self.pid) != self._start:
            raise NotShared(f"the weight daemon at {self.path} (process {self.pid}) has ended, and its memory with it")


class DaemonCopy(StillWeights):
    """The base of a job, as views of the daemon's tensors."""

    is_writable = True

    def __init__(self, daemon: WeightDaemon, wanted: Wanted, sizes: Sizes, permit: Permit) -> None:
        self._daemon, self._permit = daemon, permit
        self.tensors = self._views(tensors_of(daemon, wanted), wanted, sizes)
        self.digest = digest_of(self.tensors)
        outer, self._layers = split(self.tensors, layers_in(sizes))
        self.outer: Tensors = outer
        self._seal = Seal(self.tensors, str(daemon.path))

    @staticmethod
    def _views(held: Tensors, wanted: Wanted, sizes: Sizes) -> dict[str, torch.Tensor]:
        views = as_checkpoint(held, sizes)
        for name, view in views.items():
            if view.device != wanted.device:
                raise BadBase(f"{name} is on {view.device}, the job trains on {wanted.device}")
            if view.dtype != wanted.dtype:
                raise BadBase(f"{name} is {view.dtype}, the job's dtype is {wanted.dtype}: quantized?")
        return views

    def permitted(self) -> None:
        self._permit.check()
        self._daemon.check()

    def check(self) -> None:
        self._daemon.check()
        self._seal.check()


def tensors_of(daemon: WeightDaemon, wanted: Wanted) -> Tensors:
    if getattr(wanted.config, "quantization_config", None):
        raise BadBase("a quantized base is not shared: its weights are packed in forms that only its engine reads")
    from valve_tune.base import sglang_daemon, vllm_daemon

    ask = vllm_daemon.ask if daemon.path.name.startswith("vllm_") else sglang_daemon.ask
    try:
        return ask(daemon, wanted)
    except ImportError as error:
        engine = daemon.path.name.partition("_")[0]
        raise BadBase(
            f"{error}: run valve tune in the environment of {engine}, where its wheel is installed, too "
            "(VALVE_TUNE_PYTHON names the Python of it)"
        ) from None
    except (OSError, EOFError) as error:
        raise BadBase(f"{daemon.path}: {error}") from error
