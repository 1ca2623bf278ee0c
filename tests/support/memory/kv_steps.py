"""The question before an engine step over elastic memory, as a fake valved answers it."""

from __future__ import annotations

import queue

from fake_daemon import FEATURE_KV_STEP, KV_STEP


class Asked:
    """Answers KV_STEP with `status` and keeps the questions."""

    def __init__(self, pool, status=0):
        self.status, self.seen = status, queue.Queue()
        pool.daemon.features |= FEATURE_KV_STEP
        self._take = pool.take
        pool.daemon.on_message = self.take

    def take(self, client, message):
        if message.type != KV_STEP:
            return self._take(client, message)
        self.seen.put(message.range)
        client.ack(message, self.status)
        return True
