"""Whether kube-scheduler and the extender of one pod can place pods together: the liveness of kube-scheduler.

kube-scheduler keeps its lease while its extender is gone, and every pod waits although another replica is well. The
kubelet asks here instead: no answer, or an answer that names a failure, ends kube-scheduler and with it its lease."""

import asyncio
import ssl
import time
from collections.abc import Callable

from valve_kube import wire
from valve_kube.errors import in_words

PAIR_PATH = "/pairz"
# The first list of a large cluster takes a while, and so does one after the lease was won.
_GRACE_S = 60.0
_TIMEOUT_S = 2.0


class Pair:
    def __init__(
        self, missing: Callable[[], list[str]], port: int, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._missing = missing
        self._port = port
        self._now_s = now_s
        self._ready_at_s = now_s()

    async def failure(self) -> str:
        """Empty while both are well."""
        missing, now_s = self._missing(), self._now_s()
        if not missing:
            self._ready_at_s = now_s
        elif now_s - self._ready_at_s > _GRACE_S:
            return f"the extender has not been ready for {now_s - self._ready_at_s:.0f} s: {' '.join(missing)}"
        try:
            status = await asyncio.wait_for(self._healthz(), _TIMEOUT_S)
        except (OSError, asyncio.IncompleteReadError, wire.ProtocolError, asyncio.TimeoutError) as error:
            return f"kube-scheduler does not answer: {in_words(error)}"

        return "" if status == 200 else f"kube-scheduler says {status}"

    async def _healthz(self) -> int:
        # It makes its certificate at its start, so no client can know it. The connection does not leave the pod.
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=tls)
        try:
            writer.write(wire.message("GET /healthz HTTP/1.1", {"Host": "127.0.0.1", "Connection": "close"}, b""))
            head = await wire.read_head(reader)
            return int(head.start[1]) if head is not None else 0
        finally:
            writer.close()
