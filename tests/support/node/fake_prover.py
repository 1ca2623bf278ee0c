"""A ProverPort that believes every descriptor but those that a test names, at once or when it is told to."""

from __future__ import annotations

import os


class FakeProver:
    def __init__(self):
        self.foreign = set()  # h_clients that no descriptor owns
        self.is_slow = False  # answers wait for `answer`
        self.waiting = []

    def check(self, fd, gpu, h_client, h_subdevice, keep, then, account):
        self.waiting.append((fd, h_client, keep, then))
        if not self.is_slow:
            self.answer()

    def answer(self):
        waiting, self.waiting = self.waiting, []
        for fd, h_client, keep, then in waiting:
            is_own = h_client not in self.foreign
            kept = fd if is_own and keep else -1
            if kept < 0:
                os.close(fd)
            then(is_own, kept)

    def drop(self, fd, account):
        os.close(fd)
