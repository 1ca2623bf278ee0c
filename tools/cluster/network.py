"""A network for pods of the real node that want one of their own, on this machine alone.

A bridge without a port to the outside, and on it the address that every pod knows the API server by. The API server
itself stays on loopback: a relay (this module as a program) stands at that address.

    python -m valve_tools.cluster.network ADDRESS PORT
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from valve_tools.cluster.controlplane import ControlPlane
from valve_tools.cluster.told import API_ADDRESS

Json = dict[str, Any]
BRIDGE = "valve-pods"
PLUGINS = Path("/usr/lib/cni")
# Beside the services' range, of the block set aside for benchmarks (RFC 2544): no host routes it.
SUBNET, GATEWAY = "198.18.1.0/24", "198.18.1.1"


def missing() -> str:
    """Why pods can have no network here; empty when they can."""
    if importlib.util.find_spec("pyroute2") is None:
        return "no pyroute2: pip install pyroute2"
    absent = [name for name in ("bridge", "host-local", "loopback") if not (PLUGINS / name).exists()]
    return f"no {', '.join(absent)} in {PLUGINS}: apt-get install containernetworking-plugins" if absent else ""


class PodNetwork:
    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self._plane = plane
        self._folder = folder

    def start(self) -> None:
        self.stop()  # of a run that was killed
        with _netlink() as ip:
            ip.link("add", ifname=BRIDGE, kind="bridge")
            index = ip.link_lookup(ifname=BRIDGE)[0]
            ip.addr("add", index=index, address=GATEWAY, prefixlen=24)
            ip.addr("add", index=index, address=API_ADDRESS, prefixlen=32)
            ip.link("set", index=index, state="up")
        module = ("-m", "valve_tools.cluster.network")
        self._plane.spawn("relay", *module, API_ADDRESS, str(self._plane.port), program=sys.executable)

    def stop(self) -> None:
        if "relay" in self._plane.processes:
            self._plane.kill("relay")
        with _netlink() as ip:
            for index in ip.link_lookup(ifname=BRIDGE):
                ip.link("del", index=index)

    def configuration(self) -> Json:
        """What the CNI plugins read."""
        ranges = [[{"subnet": SUBNET, "gateway": GATEWAY}]]
        addresses = {"type": "host-local", "dataDir": str(self._folder / "addresses"), "ranges": ranges}
        plugin = {"type": "bridge", "bridge": BRIDGE, "ipam": addresses | {"routes": [{"dst": "0.0.0.0/0"}]}}
        return {"cniVersion": "1.0.0", "name": BRIDGE, "plugins": [plugin]}


def _netlink() -> Any:
    """For tests on clusters: an installation without them has the other commands of these tools."""
    from pyroute2 import IPRoute

    return IPRoute()


async def _relay(address: str, port: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_pour(reader, back), _pour(there, writer))

    server = await asyncio.start_server(connected, address, 443)
    await server.serve_forever()


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


if __name__ == "__main__":
    asyncio.run(_relay(sys.argv[1], int(sys.argv[2])))
