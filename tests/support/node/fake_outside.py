"""An OutsidePort on virtual time: what valved makes sparse is so on the fake card, at once or late, or refused."""

from __future__ import annotations

import os
from collections import deque
from functools import partial

from valved.machine.ports import SparseResult

SPARSE_NS = 24_000  # a call, however long the run


class FakeOutside:
    def __init__(self, clock):
        self.clock = clock
        self.memory = {}  # descriptor that was passed -> what is to be told of a run
        self.fails = deque()  # statuses of the next pieces of work; a run before it is done
        self.is_real = True  # False: the card says yes and does nothing
        self.hangs = self.hung = False
        self.is_dead = False  # valved is: what it had not begun is never done
        self.waiting = []
        self.under_way = []  # what each call would do
        self.open_fds = set()
        self.junk = set()  # descriptors that are no memory of the driver

    def is_uvm(self, fd):
        return fd in self.memory

    def is_handle(self, fd):
        return fd not in self.junk

    def open(self, fd, uuid):
        self.open_fds.add(fd)
        return FakeDoor(self, fd)

    def die(self, most):
        """valved is dead. As many of the calls that it had begun are done by then, and it hears of none."""
        self.is_dead, self.hung = True, self.hung or self.hangs
        for make in self.under_way[:most]:
            make()

    def go_on(self):
        """What hung comes back."""
        self.hangs, self.hung = False, True
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()


class FakeDoor:
    def __init__(self, port, fd):
        self.port, self.fd = port, fd
        self.is_open = True
        self.pending = 0
        self.free_ns = 0

    def make_sparse(self, runs, then):
        assert self.is_open
        self.pending += 1

        def make(most):
            for address, size in runs[:most]:
                self.port.memory[self.fd](address, size, self.port.is_real)

        under_way = partial(make, len(runs))
        self.port.under_way.append(under_way)

        def done():
            if self.port.is_dead:
                return
            self.port.under_way.remove(under_way)
            status = self.port.fails.popleft() if self.port.fails else 0
            made = 1 if status and len(runs) > 1 else 0 if status else len(runs)
            make(made)
            self.pending -= 1
            then(SparseResult(status=status, runs=made, took_ns=SPARSE_NS * made))
            self._leave()

        def come_back():
            if self.port.hangs:
                self.port.waiting.append(done)
            else:
                done()

        self.free_ns = max(self.free_ns, self.port.clock.now_ns()) + SPARSE_NS * len(runs)  # one after the other
        self.port.clock.call_at_ns(self.free_ns, come_back)

    def close(self):
        self.is_open = False
        self._leave()

    def _leave(self):
        if not self.is_open and not self.pending and self.fd in self.port.open_fds:
            self.port.open_fds.discard(self.fd)
            os.close(self.fd)
