"""`valve top` on a played status: what its lines say, at which width, and what its keys do."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest
from fake_daemon import until
from rich.console import Console
from valve.v1 import node_pb2

from valved.cli import status, top
from valved.cli.exits import CliError
from valved.cli.keys import ENTERS, HIDES, LEAVES, SHOWS, Keys, is_live
from valved.cli.top import ORDERS, WIDTH, History, View, render

SECOND_NS = 1_000_000_000


def played(looks=4):
    """A history and the last answer: an online service busy for a quarter of each second, a batch with the rest."""
    history = History()
    for look in range(1, looks + 1):
        answer = node_pb2.Status(version="1.0", pid=1, monotonic_ns=look * SECOND_NS, mode=node_pb2.MODE_HARVEST)
        gpu = answer.gpus.add(index=0, channels=8, preemptions=3 * look, harvest_ns=look * 750_000_000)
        gpu.preempt_latency.bound_us.extend([500.0, 1000.0])
        gpu.preempt_latency.count.extend([look, 0, 0])
        answer.services.add(
            id=1, name="chat", role=node_pb2.ROLE_ONLINE, gpus=[0], preemptions=3 * look, delay_ns=look * 420_000,
            busy_ns=look * 250_000_000, idle_ns=look * 750_000_000, state="idle: gave way",
        )  # fmt: skip
        answer.services.add(
            id=2, name="batch", role=node_pb2.ROLE_OFFLINE, gpus=[0], harvest_ns=look * 750_000_000, state="running"
        )
        answer.services.add(id=3, name="another", role=node_pb2.ROLE_OFFLINE, gpus=[0], harvest_ns=0, state="running")
        history.take(answer)
    return history, answer


def shown(width, view=None, *, has_keys=True, looks=4):
    history, answer = played(looks)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(answer, history, view or View(), has_keys=has_keys))
    return console.file.getvalue().splitlines()


def row(lines, name):
    return next(line for line in lines if f" {name} " in line)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_no_line_is_wider_than_the_terminal_and_no_sparkline_is_cut(width):
    lines = shown(width, looks=WIDTH + 5)

    assert max(map(len, lines)) <= width
    assert "▂" * WIDTH in row(lines, "chat")
    assert "▆" * WIDTH in row(lines, "batch")


def test_each_service_shows_its_own_share_of_time():
    lines = shown(160)

    assert "25%" in row(lines, "chat")
    assert "75%" in row(lines, "batch")
    assert " 0%" in row(lines, "another")


def test_the_widest_view_says_everything_and_the_narrow_one_what_matters():
    wide, narrow = shown(160), shown(80)

    assert all(word in row(wide, "chat") for word in ("online", "12", "1.68 ms", "idle: gave way"))
    assert all(word in row(narrow, "chat") for word in ("25%", "▂"))


def test_the_first_look_has_no_share_yet():
    assert "%" not in row(shown(160, looks=1), "chat")


def test_keys_are_named_only_where_there_are_some():
    assert any("q end" in line for line in shown(80))
    assert not any("q end" in line for line in shown(80, has_keys=False))


@pytest.mark.parametrize(
    ("presses", "names"),
    [
        ("", "chat batch another"),
        ("s", "another batch chat"),
        ("sr", "chat batch another"),
        ("r", "another batch chat"),
    ],
)
def test_services_are_sorted_by_the_key_that_was_pressed(presses, names):
    view = View()
    for key in presses:
        assert view.press(key)

    lines = shown(160, view)
    found = sorted(("chat", "batch", "another"), key=lambda name: lines.index(row(lines, name)))

    assert " ".join(found) == names


def test_most_stops_most_delay_and_most_harvested_come_first():
    _, answer = played()

    tops = {order: View(order=order).sorted(answer.services)[0].name for order in ORDERS}

    assert tops == {"id": "chat", "name": "another", "stops": "chat", "delay": "chat", "harvested": "batch"}


def test_the_order_goes_round_and_an_unknown_key_changes_nothing():
    view = View()
    for _ in ORDERS:
        view.press("s")
    view.press("x")
    view.press("")

    assert view == View()


def test_space_holds_the_view_and_q_ends_it():
    view = View()

    assert view.press(" ")
    assert view.held
    assert not view.press("q")


def test_a_key_is_heard_and_a_terminal_that_is_gone_is_not_asked_again():
    read, write = os.pipe()
    keys = Keys(read)
    os.write(write, b"s")

    assert keys.wait(200) == "s"

    os.close(write)

    assert keys.wait(200) == ""
    assert not keys.is_there
    os.close(read)


def test_a_key_that_was_pressed_is_never_lost_to_one_before_it():
    """A look at a busy machine takes a while, and no letter of a key without a letter (F2, Alt) counts."""
    read, write = os.pipe()
    keys = Keys(read)
    heard = []
    for typed in (b"sr", b"\x1bOQ", b"\x1bq", b" "):
        os.write(write, typed)
        heard.append(keys.wait(200))

    assert heard == ["sr", "", "", " "]
    os.close(read)
    os.close(write)


class Script:
    """Keys as they are pressed, one wait after the other."""

    is_there = True

    def __init__(self, *waits):
        self.waits = list(waits)

    def wait(self, seconds):
        return self.waits.pop(0)


class Screen:
    def __init__(self, height):
        self.console = SimpleNamespace(height=height)
        self.drawn = []

    def update(self, view, *, refresh):
        out = io.StringIO()
        Console(file=out, width=80, color_system=None).print(view)
        self.drawn.append(out.getvalue())


def crowd(count):
    answer = node_pb2.Status(version="1")
    for number in range(count):
        answer.services.add(id=number, name=f"chat-{number}", role=node_pb2.ROLE_ONLINE, state="busy")
    return answer


def test_what_no_screen_shows_is_never_drawn_each_second():
    """Else a hundred services cost half a core as long as somebody looks, beside these services."""
    screen = Screen(height=24)

    assert top.stay(screen, Script(""), top.View(), crowd(100), top.History(), 0.0)

    assert len(screen.drawn) == 1
    assert "Services (100)" in screen.drawn[0]
    assert "chat-23" in screen.drawn[0]
    assert "chat-24" not in screen.drawn[0]


@pytest.mark.parametrize("height", [10, 16, 17, 24])
@pytest.mark.parametrize("gpus", [1, 8])
def test_no_screen_is_too_low_for_a_service(height, gpus):
    screen, answer = Screen(height), crowd(2)
    for index in range(gpus):
        answer.gpus.add(index=index)

    top.draw(screen, Script(), top.View(), answer, top.History())

    seen = screen.drawn[0].splitlines()[: height - 1]  # the last line says that there is more
    assert any("chat-0" in line for line in seen)
    assert any("space hold" in line for line in seen)


def test_each_key_of_several_is_obeyed_and_a_held_view_stays():
    screen, view = Screen(height=24), top.View()

    assert not top.stay(screen, Script("sr", " ", "", " q"), view, crowd(2), top.History(), 1000.0)

    assert (view.order, view.reverse) == ("name", True)
    assert "reversed, held" in screen.drawn[2]


RESTS = "\n    while True: time.sleep(0.01)"  # in one sleep, a signal that comes just before it is never heard
KEYS = """
import signal, time; from rich.console import Console; from valved.cli.keys import keys
for number in (signal.SIGHUP, signal.SIGQUIT): signal.signal(number, signal.SIG_DFL)  # the tests may ignore them
with keys(Console()):RESTS
"""


@pytest.fixture
def terminal(monkeypatch):
    """Its two ends: what a person sees, and what a program has."""
    monkeypatch.setenv("TERM", "xterm")
    seen, end = pty.openpty()
    yield seen, end
    os.close(seen)
    os.close(end)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_view_that_is_killed_never_keeps_the_terminal(terminal, how):
    """Its shell would show nothing of what is typed."""
    _, end = terminal
    before = termios.tcgetattr(end)
    view = subprocess.Popen([sys.executable, "-c", KEYS.replace("RESTS", RESTS)], stdin=end, stdout=end)
    until(lambda: termios.tcgetattr(end) != before)

    view.send_signal(how)

    assert (view.wait(), termios.tcgetattr(end)) == (128 + how, before)


SCREEN = """
import os, signal, time; os.setpgrp(); signal.signal(signal.SIGTSTP, signal.SIG_DFL)  # as a job of a shell
from rich.live import Live; from valved.cli.keys import keys; from valved.cli.tables import Paper
console = Paper()
with keys(console), Live(console=console, auto_refresh=False, screen=True):WAITS
"""
WAITS = [RESTS, "\n  with console:\n    console.print('half a page'); os.write(1, b'drawing')" + RESTS]


def reads(seen, *ends):
    """What is written until all of these were."""
    text = b""
    while not all(end in text for end in ends):
        text += os.read(seen, 1 << 16)
    return text


@pytest.mark.parametrize("waits", WAITS, ids=["at rest", "drawing"])
def test_a_view_that_is_stopped_never_leaves_its_shell_without_screen_and_cursor(terminal, waits):
    """By Ctrl-Z. When it goes on, it has them again."""
    seen, end = terminal
    before = termios.tcgetattr(end)
    view = subprocess.Popen([sys.executable, "-c", SCREEN.replace("WAITS", waits)], stdin=end, stdout=end)
    try:
        reads(seen, ENTERS, HIDES, *([b"drawing"] if "drawing" in waits else []))
        in_view = termios.tcgetattr(end)

        view.send_signal(signal.SIGTSTP)

        reads(seen, LEAVES, SHOWS)
        assert os.WIFSTOPPED(os.waitpid(view.pid, os.WUNTRACED)[1])
        assert termios.tcgetattr(end) == before
        view.send_signal(signal.SIGCONT)
        reads(seen, ENTERS, HIDES)
        assert termios.tcgetattr(end) == in_view
    finally:
        view.kill()
        view.wait()


@pytest.mark.parametrize(("looks", "pages"), [(0, 3), (3, 1)])
def test_a_view_that_cannot_be_drawn_anew_never_shows_nothing(looks, pages):
    """In a pipe, and on a terminal such as that of Emacs' shell."""
    out = io.StringIO()
    page = top.Pages(Console(file=out, width=80, color_system=None), looks)
    for _ in range(3):
        page.update("a look", refresh=True)

    assert out.getvalue().count("a look") == pages


def test_a_terminal_without_a_cursor_is_never_drawn_on(terminal, monkeypatch):
    _, end = terminal
    monkeypatch.setenv("TERM", "dumb")
    with os.fdopen(os.dup(end), "w") as out:
        assert not is_live(Console(file=out))
        monkeypatch.setenv("TERM", "xterm")
        assert is_live(Console(file=out))


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_figure_is_never_cut_where_a_name_can_be(width):
    """Of 100 % there was 10 left, and an ellipsis."""
    answer = node_pb2.Status(monotonic_ns=1)
    answer.services.add(id=1, name="n" * 200, role=node_pb2.ROLE_ONLINE, state="idle")
    history = History()
    history.services[1].append(1.0)
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(top.services(answer, history, View(), 9))

    assert "100%" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= width


def test_a_view_never_ends_because_valved_is_started_again(monkeypatch):
    answers = [node_pb2.Status(pid=1), CliError("no valved answers in /run", is_silence=True), node_pb2.Status(pid=2)]
    shown = []
    monkeypatch.setattr(
        top, "stay", lambda live, keys, view, answer, *_: shown.append((answer.pid, view.silence)) or True
    )

    def status():
        answer = answers.pop(0)
        if isinstance(answer, CliError):
            raise answer
        return answer

    live = SimpleNamespace(update=lambda *_, **__: None)
    pressed, connection = SimpleNamespace(is_there=False), SimpleNamespace(status=status)
    top.follow(live, pressed, connection, SimpleNamespace(sort="id", looks=3, interval=0.0))

    assert shown == [(1, ""), (1, "no valved answers in /run")]
    assert answers == []


def test_a_long_name_never_takes_the_room_of_what_happens():
    """Names of pods have up to 253 characters, and a user of the API chooses any."""
    answer = node_pb2.Status()
    for number in range(2):
        answer.services.add(
            id=number, name=f"team/{'x' * 200}-{number}", role=node_pb2.ROLE_ONLINE, state="cooling down"
        )
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(status.services(answer))

    rows = [line for line in out.getvalue().splitlines() if "team/" in line]
    assert [row.split()[1].startswith("team/xxx") and row.split()[1][-2:] for row in rows] == ["-0", "-1"]
    assert all("online" in row and "cooling down" in row for row in rows)


def test_a_note_of_many_clients_never_fills_the_screen():
    answer = node_pb2.Status(version="1")
    for pid in range(100, 164):
        answer.clients.add(pid=pid, comm="work", notes=["its shim is older"])
    answer.clients.add(pid=7, comm="work", notes=["alone"])

    (text,) = status.notes(answer)

    assert text.plain.splitlines() == [
        "Notes",
        "  clients 100 (work), 101 (work), 102 (work), 103 (work), 104 (work) and 59 more: its shim is older",
        "  client 7 (work): alone",
    ]
