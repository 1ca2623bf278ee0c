"""Hostile processes that say cheap things about KV memory without end, as fast as valved reads them."""

from __future__ import annotations

import select
import socket

from valve_tools.hostile.link_ends import SHORT_S, hello_of, packet_of, welcomed

from valved.abi import link
from valved.abi.link import LinkType
from valved.model.ids import Role

AT_ONCE = 64


def _says(sock: socket.socket, packet: bytes) -> None:
    """Until the kernel has no room for more, and reads what valved answers: it would be dropped else."""
    try:
        for _ in range(AT_ONCE):
            sock.send(packet, socket.MSG_DONTWAIT)
        while sock.recv(link.MAX_PACKET, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        select.select([sock], [sock], [], SHORT_S)


class FloodsKv:
    """A shim's ranges, which valved refuses, and its hook's needs."""

    def __init__(self, *, ranges: bool = False, needs: bool = False) -> None:
        self._kinds = [kind for kind, is_said in ((LinkType.KV_RANGE, ranges), (LinkType.KV_NEED, needs)) if is_said]
        self._socks: dict[LinkType, socket.socket] = {}

    def __call__(self, path: str) -> None:
        try:
            if not self._socks:
                self._socks = {LinkType.KV_RANGE: self._join(path, Role.OFFLINE)}
                self._socks[LinkType.KV_NEED] = self._join(path, Role.HOOK)
            for kind in self._kinds:
                _says(self._socks[kind], packet_of(kind))
        except OSError:
            for sock in self._socks.values():
                sock.close()
            self._socks = {}

    def _join(self, path: str, role: Role) -> socket.socket:
        sock = welcomed(path, hello_of(role))
        sock.setblocking(False)
        return sock
