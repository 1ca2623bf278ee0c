"""Fakes of one test leave nothing that acts in the next one."""

from __future__ import annotations

import os

import lent_fds


class Dropped:
    """Refers to itself, as worlds do: only the garbage collector ends it."""

    def __init__(self, seen):
        self.itself, self.seen, self.fd = self, seen, lent_fds.lend()

    def __del__(self):
        self.seen.append(lent_fds.is_lent(self.fd))


def test_what_a_test_dropped_never_ends_while_another_one_runs_nor_after_its_descriptors_are_gone():
    seen = []
    Dropped(seen)
    lent_fds.collect()
    assert seen == [True]


def test_a_descriptor_that_has_another_file_by_now_is_never_closed():
    fd, file = lent_fds.lend(), os.open(os.devnull, os.O_RDONLY)
    os.dup2(file, fd)
    os.close(file)
    lent_fds.collect()
    os.close(fd)
