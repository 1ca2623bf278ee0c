"""One valved a card, whatever their run folders."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from valved.errors import AlreadyRunning
from valved.machine import cardlock
from valved.machine.cardlock import CardLock

HOLD = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cards(tmp_path, monkeypatch):
    monkeypatch.setattr(cardlock, "PATIENCE_S", 0.0)
    for minor in (0, 3):
        (tmp_path / f"nvidia{minor}").touch()
    return tmp_path


def held_by_another(path):
    child = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"held\n"
    return child


def test_two_daemons_never_manage_one_card(cards):
    other = held_by_another(cards / "nvidia3")
    with pytest.raises(AlreadyRunning, match=f"process {other.pid} manages .*nvidia3"):
        CardLock(cards).take()
    last = held_by_another(cards / "nvidia0")  # nothing stays locked behind a refusal
    last.kill()
    last.wait()
    other.communicate()
    CardLock(cards).take()


def test_a_successor_takes_the_cards_that_its_predecessor_let_go(cards):
    first = CardLock(cards)
    first.take()
    first.release()
    CardLock(cards).take()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's valved has something to fear of others")
def test_a_user_who_locks_a_card_never_keeps_the_daemon_of_root_from_starting(cards, monkeypatch):
    other = held_by_another(cards / "nvidia0")
    monkeypatch.setattr(cardlock, "_uid", lambda pid: 1000)
    CardLock(cards).take()
    other.communicate()
