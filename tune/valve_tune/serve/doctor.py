"""`valve tune doctor`: what training and publishing need on this machine, each finding with what mends it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from valve_tune.serve import registry

NEEDED = ("torch", "transformers", "safetensors", "aiohttp", "numpy")
WELCOME = {"tensorboard": "curves in TensorBoard", "peft": "loading adapters in a program of your own"}
ROOM_BYTES = 2 << 30
FINDINGS = 5  # as in valved.cli.exits
Finding = tuple[bool, str]


def packages() -> Iterator[Finding]:
    for name in NEEDED:
        try:
            yield True, f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield False, f"{name} is missing: make .venv-tune/.installed, or install the wheel of tune/"
    for name, use in WELCOME.items():
        try:
            yield True, f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield True, f"{name} is not installed ({use})"


def device() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        role = os.environ.get("VALVE_ROLE")
        if role == "offline":
            yield True, f"GPU {torch.cuda.get_device_name(0)}, run as offline work"
        else:
            yield False, "a GPU, and this is no offline work: start jobs by valve run --offline -- valve tune run ..."
    else:
        yield True, f"no GPU: training runs on {os.cpu_count()} CPUs"


def places() -> Iterator[Finding]:
    home = registry.home()
    try:
        home.mkdir(parents=True, exist_ok=True)
        writable = os.access(home, os.W_OK)
    except OSError:
        writable = False
    yield writable, f"{home} is {'' if writable else 'not '}writable (where jobs are listed)"
    free = shutil.disk_usage(os.getcwd()).free
    yield free >= ROOM_BYTES, f"{free / (1 << 30):.0f} GiB free here for adapters and checkpoints"


def base(model: str) -> Iterator[Finding]:
    """Whether this base can be trained, in which way, and what its tokenizer is good for."""
    from valve_tune.serve.runner import tokenizer_of
    from valve_tune.train.build import config_of
    from valve_tune.train.data import vocabulary
    from valve_tune.train.examples import MARKED, template_of

    try:
        config, size, tokenizer = config_of(Path(model)), vocabulary(model), tokenizer_of(model)
    except ValueError as error:
        yield False, str(error)
        return
    why = obstacle(config)
    yield True, f"{config.model_type}: its tiles are {f'by autograd, as {why}' if why else 'written out'}"
    largest = max(tokenizer.get_vocab().values(), default=-1)
    wrong = largest >= size
    yield (
        not wrong,
        f"the tokenizer has tokens up to {largest}, the model {size}"
        + ("; it is another model's: take the one that came with the base" if wrong else ""),
    )
    template = template_of(tokenizer)
    if not template:
        yield False, "no chat template, so data with messages is refused: add chat_template.jinja beside the model"
    else:
        how = "marks" if MARKED.search(template) else "does not mark"
        yield True, f"the chat template {how} what the assistant says"


def obstacle(config: Any) -> str:
    from valve_tune.model import family

    return family.obstacle(config, max_length=1)


def command(model: str = "") -> int:
    found = [*packages(), *device(), *places(), *(base(model) if model else ())]
    for is_well, text in found:
        print(f"{'ok  ' if is_well else 'FIX '} {text}")
    return 0 if all(is_well for is_well, _ in found) else FINDINGS
