"""`valve tune fleet`: one trainer of a fleet job. A router hands out micro-batches and decides when this node trains.

Killed at any moment, the same command goes on from its last push: what it computed since then is queued again and
counts once. It pushes every --push-steps steps, and where the round ends. A router that is away is asked again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from valve_tune.base.consent import NotShared
from valve_tune.base.weights import BadBase
from valve_tune.model.adapter import BadAdapter
from valve_tune.model.names import BadTarget
from valve_tune.options import key_file, option, whole
from valve_tune.serve.control import FolderControl
from valve_tune.serve.folder import GO, FolderError, JobFolder
from valve_tune.serve.jobs import INTERRUPTED
from valve_tune.serve.keeper import EngineKeeper
from valve_tune.serve.link import GivenUp, RouterAway, RouterLink
from valve_tune.serve.patience import AsksRouter, PatientLink
from valve_tune.serve.publish import FILES, copied, drop_old, number_of, token_in
from valve_tune.serve.runner import rows_of, state_after
from valve_tune.train.average import METHODS
from valve_tune.train.data import Rows
from valve_tune.train.guard import stand
from valve_tune.train.report import Answer, End, Outcome
from valve_tune.train.spec import JobSpec

WAIT_S = 0.2  # until a trainer that may not train asks again
SLICE_S = 1.0  # of a longer wait: then a cancel is heard
OVER = "over"


class FleetWorker:
    """`trainer` is a `train.part.PartTrainer`, or what a test plays in its place."""

    def __init__(
        self,
        link: AsksRouter,
        trainer: Any,
        *,
        job: str,
        name: str,
        replica: str = "",
        push_steps: int = 10,
        moved: Callable[[int, int], None] = lambda version, kept: None,
        say: Callable[[str], None] = print,
        is_paused: Callable[[], bool] = lambda: False,
        ask: Callable[[], None] = lambda: None,
        offer: dict[str, Any] | None = None,
        trouble: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`ask` waits while the owner pauses this trainer, and raises at its end: also if it has nothing to do.
        `offer`: the job, for a router that does not know it yet. `trouble` hears what lasts, and "" when it is over."""
        self._beside, self._trainer = link, trainer
        self._link = PatientLink(link, self._told)
        self._job, self._name, self._replica, self._push_steps = job, name, replica, push_steps
        self._moved, self._say, self._is_paused = moved, say, is_paused
        self._ask, self._offer, self._trouble = ask, offer, trouble
        self._refused = -1  # the version of which the router refused this trainer's average
        self._number = 0
        self._is_unsure, self._begun = False, ""
        self._stands_at: tuple[str, ...] = ()  # the version and the push that are in the trainer, and nothing beyond
        self.version = -1
        self._took_s = 0.0
        self._silent_s = 60.0

    def run(self) -> int:
        """Until the job is done: its last version."""
        while True:
            self._heard()
            try:
                if self._is_unsure:
                    self._settle()
                if self._number == 0:
                    self._join()
                with self._alive(self._number):
                    said = self._once()
                if said == OVER:
                    return self.version
            except GivenUp as error:
                self._number = 0  # goes on from its last push
                self._wait(self._link.after(error))
            except RouterAway as error:
                self._is_unsure = True
                self._wait(self._link.after(error))

    def _heard(self) -> None:
        began = time.monotonic()
        self._ask()
        self._link.paused(time.monotonic() - began)

    def _wait(self, seconds: float) -> None:
        while seconds > 0:
            time.sleep(min(seconds, SLICE_S))
            seconds -= SLICE_S
            self._heard()

    def _told(self, text: str) -> None:
        self._say(text or "the router answers again")
        self._trouble(text)

    @contextlib.contextmanager
    def _alive(self, trainer: int) -> Iterator[None]:
        """The router hears of this trainer beside work that takes longer than it waits for a word. Not while the job is
        paused: then others train what it holds."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(self._silent_s / 4):
                with contextlib.suppress(RouterAway, GivenUp, FolderError):  # the next word of the work meets it, too
                    if not self._is_paused():
                        self._beside.ask("seen", {"trainer": trainer})

        threading.Thread(target=tell, name="fleet-alive", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _settle(self) -> None:
        """An answer is lost, and with it perhaps a micro-batch that is ours, or that a push was kept. The same push
        once more counts once; before it was answered nothing more is computed on top. Then this trainer begins anew."""
        if self._number:
            with contextlib.suppress(GivenUp, FolderError):
                self._push()
        self._number, self._is_unsure = 0, False

    def _join(self) -> None:
        if self._offer is not None:
            self._link.ask("job", self._offer)
            self._offer = None  # a router that has forgotten the job is refused: it would begin at version 0
        joined = self._link.ask("join", {"job": self._job, "name": self._name})
        self._silent_s = joined["silent_s"]
        stands_at = (joined["start"], joined["push"])
        if joined["version"] != self.version or stands_at != self._stands_at:
            with self._alive(joined["trainer"]):
                self._begin(joined)
        self._stands_at = stands_at
        self.version, self._number, self._took_s = joined["version"], joined["trainer"], 0.0
        begun = f"version {self.version}: {joined['steps']} steps of this round are kept"
        if begun != self._begun:  # once, however often it joins
            self._say(begun)
        self._begun = begun

    def _begin(self, joined: dict[str, Any]) -> None:
        self._stands_at = ()
        start = self._link.blob(joined["start"])
        if joined["version"] != self.version and joined["version"] > 0:
            self._trainer.begin(start, b"", 0, 0)  # what is handed over is the version, without this node's part
            self._moved(joined["version"], joined.get("kept", 0))  # an older router does not count
        self._trainer.begin(start, self._link.blob(joined["push"]), joined["tokens"], joined["steps"])

    def _once(self) -> str:
        asked = {"job": self._job, "trainer": self._number, "version": self.version, "replica": self._replica}
        told = self._link.ask("take", {**asked, "took_s": self._took_s})
        self._took_s = 0.0
        if "number" in told:
            began = time.monotonic()
            self._stands_at = ()
            self._trainer.compute(told["number"])
            self._took_s = time.monotonic() - began
            if self._trainer.steps_since_push >= self._push_steps:
                self._push()
        elif told.get("done"):
            return OVER
        elif "version" in told:
            self._number = 0
        elif "average" in told:
            self._average(told["average"])
        elif told.get("empty") and self._has_more():
            self._push()
        else:
            time.sleep(WAIT_S)
        return ""

    def _has_more(self) -> bool:
        self._trainer.step()
        return bool(self._trainer.since_push)

    def _push(self) -> None:
        trainer = self._trainer
        if not trainer.since_push:
            return
        said = {"job": self._job, "trainer": self._number, "version": self.version, "numbers": trainer.since_push}
        self._link.send("push", {**said, "tokens": trainer.tokens, "steps": trainer.steps}, trainer.document())
        trainer.pushed()
        self._say(f"version {self.version}: pushed {trainer.steps} steps, {trainer.tokens:,} tokens")

    def _average(self, parts: list[dict[str, Any]]) -> None:
        """A trainer that sees a whole round averages it; all come to the same, and the first one counts."""
        documents = [(self._link.blob(part["blob"]), int(part["tokens"])) for part in parts]
        document = self._trainer.averaged(documents)
        try:
            self._link.send("publish", {"job": self._job, "version": self.version}, document)
        except FolderError as error:  # another machine came to other last bits, and was first
            if self._refused == self.version:
                raise  # it was not: the round is still the same one
            self._refused = self.version
            self._say(str(error))
        self._number = 0


def own_name(path: Path) -> str:
    """Two nodes may have the same folders, and one node two folders of one name."""
    return f"{socket.gethostname()}-{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:6]}"


def command(options: argparse.Namespace) -> int:
    from valve_tune.serve import flags
    from valve_tune.train.job import Hopeless, Stopped, said

    values = flags.values(options)
    spec, rows = rows_of({**values, "max_steps": max(1, options.rounds * options.sync_steps)})
    folder = JobFolder(spec.out)
    job = options.job or folder.path.name
    with folder.claimed(spec, fleet=job):
        folder.want(GO)
        folder.say("running", folder.status().step)
        try:
            version = train(options, spec, rows, folder, job)
            end, message = End.DONE, ""
        except Stopped:
            end, message = End.STOPPED, "stopped; the same command goes on from the last push"
        except torch.OutOfMemoryError as error:
            end, message = End.FAILED, f"out of memory: {error}; lower max_length or per_device_train_batch_size"
        except (BadBase, NotShared, BadTarget, BadAdapter, FolderError, Hopeless, OSError) as error:
            end, message = End.FAILED, said(error, spec.out)
        outcome = Outcome(end=end, step=folder.status().step, message=message)
        try:
            folder.say(state_after(outcome, folder), outcome.step, message)
        except OSError as error:  # a full disk has ended the job, and takes no word of it either
            message = f"{message}; its state could not be written ({error.strerror})"
    if end is not End.DONE:
        print(f"valve tune: {folder.path}: {message}", file=sys.stderr)
        return INTERRUPTED if end is End.STOPPED else 1
    print(f"done: version {version} of {job} is in {folder.path}")
    return 0


def train(options: argparse.Namespace, spec: JobSpec, rows: Rows, folder: JobFolder, job: str) -> int:
    """The last version."""
    from valve_tune.train.part import PartTrainer

    link = RouterLink(options.router, token_in(options.token_file))
    control = FolderControl(folder)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(INTERRUPTED))  # as safe as a kill: the same command goes on
    trainer = PartTrainer(spec, rows, options.average, control=control)
    batches = options.sync_steps * spec.gradient_accumulation_steps
    mean = max(1, rows.tokens // max(1, len(rows)) * spec.per_device_train_batch_size)
    digest = f"{trainer.digest}/{options.average}"
    said = {"rounds": options.rounds, "round_batches": batches, "limit_s": 60.0 * options.sync_minutes}
    token = token_in(options.publish_token_file, "--publish-token-file")
    keepers = [EngineKeeper(url, token, job, partial(print, flush=True)) for url in options.publish_to]
    publish = publisher(folder, trainer, job, keepers, options.keep_versions)

    def moved(version: int, kept: int) -> None:  # a round that its time ended kept less than --sync-steps
        folder.say("running", kept // spec.gradient_accumulation_steps)
        publish(version)

    worker = FleetWorker(
        link,
        trainer,
        job=job,
        name=options.worker or own_name(folder.path),
        replica=options.replica,
        push_steps=options.push_steps,
        moved=moved,
        say=partial(print, flush=True),
        is_paused=lambda: control.answer() is Answer.PAUSE,
        ask=trainer.ask,
        trouble=lambda text: folder.say("running", folder.status().step, text),
        offer={"job": job, "tokens": mean, "digest": digest, **said},
    )
    with stand(spec, trainer.model.weights):
        version = worker.run()
        trainer.state.finish()
    for keeper in keepers:
        keeper.close()
    return version


def publisher(
    folder: JobFolder, trainer: Any, job: str, keepers: Sequence[EngineKeeper], keep: int = 0
) -> Callable[[int], None]:
    """A version of the fleet becomes a folder here, and an adapter of that name in this node's engines. The `keep`
    newest folders stay, and those that an engine has; 0: all."""

    def publish(version: int) -> None:
        trainer.state.finish()  # the trainer has just taken the version up
        home = folder.path / "published" / f"{job}-v{version}"
        if not home.is_dir():
            if any(number_of(path.name, job) > version for path in home.parent.glob("*")):  # this one was removed since
                raise FolderError(
                    f"{home.parent}: holds later versions of an earlier job {job}; choose another --job or --out"
                )
            copied(folder.path, home)
        elif (home / FILES[1]).read_bytes() != (folder.path / FILES[1]).read_bytes():
            raise FolderError(f"{home}: is another adapter, of an earlier job {job}; choose another --job or --out")
        for keeper in keepers:
            keeper.hand(home)
        used = [keeper.uses() for keeper in keepers]
        if keep and None not in used:
            drop_old(home.parent, job, keep, {home.name}.union(*(names or () for names in used)))

    return publish


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from valve_tune.serve import flags

    one = commands.add_parser("fleet", help="Train a part of a fleet job that a router queues beside requests.")
    flags.add(one)
    one.add_argument(
        "--router",
        required=True,
        metavar="URL",
        help="The URL of a router that runs as valve route serve --training DIR.",
    )
    key_file(one, "--token-file", "The file that holds the router's operator token. Default: send none.")
    one.add_argument(
        "--job", default="", help="The name of the job, the same for all of its trainers. Default: the name of --out."
    )
    one.add_argument("--worker", default="", help="The name of this trainer. Default: made of the host and --out.")
    one.add_argument(
        "--replica",
        default="",
        metavar="URL",
        help="The replica beside which it trains, by the URL that the router has.",
    )
    option(one, "--rounds", 1, "The number of averages until the job is done.", type=whole(1))
    steps = "The optimizer steps of all trainers from one average to the next."
    option(one, "--sync-steps", 100, steps, type=whole(1))
    option(
        one,
        "--sync-minutes",
        10.0,
        "Average after this many minutes if that is earlier. The next round gets what is not done then. 0 "
        "stands for no limit.",
    )
    option(one, "--average", METHODS[0], "How the averages are made.", choices=METHODS[:2])
    keep = "Keep so many versions in OUT/published, and those that an engine of --publish-to has. 0 stands for all."
    option(one, "--keep-versions", 10, keep, type=whole(0))
    often = "Send the work after so many steps. A dead node costs no more."
    option(one, "--push-steps", 10, often, type=whole(1))
    one.add_argument(
        "--publish-to",
        action="append",
        default=[],
        metavar="URL",
        help="This node's engine at this URL gets every version. Repeat the option for several engines.",
    )
    text = "The file that holds the key that --publish-to asks for. Default: send none."
    key_file(one, "--publish-token-file", text)
    one.set_defaults(run=command)
