"""Hand an adapter to a running service: each version under a new path and a new name, old ones retired.

A path that was loaded once never changes: engines keep what they computed with an adapter under its name or path.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from valve_tune.serve import registry
from valve_tune.serve.engines import EngineError, RunningEngine
from valve_tune.serve.folder import FolderError, JobFolder
from valve_tune.serve.gap import GapProbe, Gaps
from valve_tune.train import checkpoint

FILES = ("adapter_config.json", "adapter_model.safetensors")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# vLLM and SGLang serve nothing else alike; what a config holds beyond it is refused before an engine sees it.
PLAIN = {"use_dora": False, "use_rslora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    name: str
    path: Path
    retired: tuple[str, ...] = ()
    gaps: Gaps | None = None  # None: no watcher ran


def adapter_of(folder: JobFolder, step: int | None) -> Path:
    source = folder.path if step is None else folder.path / f"checkpoint-{step}"
    if step is None and not (source / FILES[1]).is_file():
        saved = folder.checkpoints()
        raise FolderError(
            f"{folder.path}: the adapter is not done"
            + (f"; --checkpoint {saved[-1][0]} publishes what it has" if saved else "")
        )
    if not all((source / name).is_file() for name in FILES):
        raise FolderError(f"{source}: holds no adapter")
    check_plain(source)
    return source


def check_base(folder: JobFolder) -> None:
    """An adapter of shared weights is handed over only while they are what it was trained on, if they are here."""
    word = folder.spec().share_weights if folder.exists() else ""
    if not word:
        return
    import torch  # slow to import, as what follows

    from valve_tune.base.weights import BaseChanged
    from valve_tune.train.build import shared_base

    trained_on = _base_of(folder)
    try:
        base = shared_base(folder.spec(), "cuda" if torch.cuda.is_available() else "cpu")
        if trained_on and base.digest != trained_on:
            raise BaseChanged(f"{word}: holds other weights than the job was trained on")
    except (OSError, ValueError) as error:
        if isinstance(error, BaseChanged) or isinstance(error.__cause__, BaseChanged):
            raise FolderError(f"{folder.path}: not published: {error}") from None
        print(f"note: the shared weights were not checked again: {error}")


def _base_of(folder: JobFolder) -> str:
    """The digest that its checkpoints hold, all the same one. A part of a fleet job has none, but what its guard has
    written down. That may have been empty, and then names what was there at a later start."""
    from valve_tune.tiles.cursor import Cursor
    from valve_tune.train.guard import BEGUN
    from valve_tune.train.state import CURSOR

    for _, path in reversed(folder.checkpoints()):
        with contextlib.suppress(OSError, ValueError):  # a damaged one
            return Cursor.parse((path / CURSOR).read_text(encoding="utf-8")).base
    begun = folder.path / BEGUN
    return begun.read_text(encoding="utf-8").strip() if begun.is_file() else ""


def check_plain(source: Path) -> None:
    try:
        config = json.loads((source / FILES[0]).read_text(encoding="utf-8"))
    except ValueError as error:
        raise FolderError(f"{source / FILES[0]}: {error}") from None
    for name, plain in PLAIN.items():
        if config.get(name) not in (plain, None, [], {}):
            raise FolderError(
                f"{source / FILES[0]}: {name} = {config[name]!r}: vLLM and SGLang do not serve it in the same way"
            )


def new_version(folder: JobFolder, name: str, source: Path, loaded: Iterable[str] = ()) -> Path:
    """A whole copy under the next number, or nothing. What the service has `loaded` may be of another job's folder."""
    if not NAME.fullmatch(name):
        raise FolderError(f"{name}: a name has up to 100 letters, digits, ., - and _")
    if name == folder.fleet:  # the fleet's next version would find its number taken, and its job end
        raise FolderError(f"{folder.path}: the router numbers the versions of {name}; choose another --name")
    sums = None if source == folder.path else _sums(source)
    with _alone(folder.path / "published") as home:
        taken = [number_of(version, name) for version in (*(path.name for path in home.iterdir()), *loaded)]
        return _copied(source, home / f"{name}-v{max(taken, default=0) + 1}", sums)


def copied(source: Path, target: Path) -> Path:
    """A whole copy, or nothing."""
    with _alone(target.parent):
        return _copied(source, target)


def drop_old(home: Path, name: str, keep: int, used: Collection[str]) -> None:
    """All but the `keep` newest versions, and but those that an engine has: it reads them again where it restarts."""
    with _alone(home):
        numbers = sorted(number_of(path.name, name) for path in home.iterdir())
        for number in numbers[:-keep]:
            old = home / f"{name}-v{number}"
            if number and old.name not in used:
                beside = old.with_name(f".{old.name}.{os.getpid()}")  # a kill leaves no half under the name
                old.rename(beside)
                shutil.rmtree(beside, ignore_errors=True)


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[Path]:
    """One process at a time publishes from a job. So what another has begun here is of one that was killed."""
    home.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(home, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            yield home
            return
        for left in home.glob(".*-v*.*"):
            if not _lives(left.suffix[1:]):  # of a former Valve, which takes no lock
                shutil.rmtree(left, ignore_errors=True)
        yield home
    finally:
        os.close(descriptor)


def _lives(pid: str) -> bool:
    return not pid.isdecimal() or (int(pid) != os.getpid() and Path("/proc", pid).exists())


def _copied(source: Path, target: Path, sums: dict[str, str] | None = None) -> Path:
    """Of a checkpoint only what was written as it, by its `sums`."""
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.mkdir()
        for each in FILES:
            content = (source / each).read_bytes()
            if sums is not None and hashlib.sha256(content).hexdigest() != sums.get(each):
                raise FolderError(f"{source / each}: is not what was written; publish another checkpoint")
            checkpoint.write_file(beside / each, content)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def _sums(source: Path) -> dict[str, str]:
    try:
        return checkpoint.sums(source)
    except (OSError, ValueError) as error:
        raise FolderError(f"{source}: {error}; publish another checkpoint") from None


def number_of(version: str, name: str) -> int:
    """0 for what is no version of this name."""
    found = re.fullmatch(re.escape(name) + r"-v([1-9][0-9]{0,8})", version)
    return int(found[1]) if found else 0


def hand_over(engine: RunningEngine, version: Path, name: str, keep: int, *, probe: bool) -> Published:
    """Load, ask once, retire. What is older than the `keep` newest versions is unloaded; running answers end first."""
    if probe:
        with GapProbe(engine) as gap:
            retired = _switch(engine, version, name, keep)
        if not gap.error:
            return Published(name=version.name, path=version, retired=retired, gaps=gap.gaps())
        print(f"valve tune: the gap was not measured: {gap.error}", file=sys.stderr)
    else:
        retired = _switch(engine, version, name, keep)
    return Published(name=version.name, path=version, retired=retired)


def _switch(engine: RunningEngine, version: Path, name: str, keep: int) -> tuple[str, ...]:
    engine.load(version.name, str(version))
    try:
        asked = engine.model_of(version.name)
        said = engine.answer(asked)
        if said != asked:
            raise EngineError(f"{engine.url}: answered as {said}, not as {asked}")
    except Exception:
        with contextlib.suppress(EngineError):  # what failed first is what is said
            engine.unload(version.name)
        raise
    # Another job may publish under the same name: what has no folder here is not ours to retire.
    ours = [each for each in engine.loaded() if number_of(each, name) and (version.parent / each).is_dir()]
    versions = sorted(ours, key=lambda each: number_of(each, name))
    retired = tuple(versions[: max(0, len(versions) - max(1, keep))])
    for each in retired:
        engine.unload(each)
    return retired


def token_in(path: str, flag: str = "--token-file") -> str:
    """What the file holds, without the end of its line."""
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FolderError(f"{flag} {path}: {getattr(error, 'strerror', None) or error}") from None
    if not token or not token.isascii() or not token.isprintable():
        raise FolderError(f"{flag} {path}: holds no key of one line")
    return token


def command(options: argparse.Namespace) -> int:
    folder = registry.find(options.job)
    name = options.name or folder.path.name
    source = adapter_of(folder, options.checkpoint)
    check_base(folder)
    try:
        engines = [RunningEngine(url, token_in(options.token_file)) for url in options.to]
        version = new_version(folder, name, source, set().union(*(engine.loaded() for engine in engines)))
    except EngineError as error:
        print(f"valve tune: {error}", file=sys.stderr)
        return 1
    print(f"version: {version.name}  {version}")
    has_failed = False
    for engine in engines:  # one that refuses keeps the version from no other
        try:
            done = hand_over(engine, version, name, options.keep, probe=not options.no_probe)
        except EngineError as error:
            print(f"valve tune: {error}", file=sys.stderr)
            has_failed = True
            continue
        model, retired = engine.model_of(done.name), ", ".join(done.retired) or "none"
        print(f"{engine.kind} at {engine.url} answers as {model}; retired: {retired}")
        if done.gaps is not None:
            print(f"longest gap in decoding: {done.gaps.words()}")
    return int(has_failed)
