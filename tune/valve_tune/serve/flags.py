"""The fields of a job as flags, spelt as people know them from TRL and peft: with dashes or underscores."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, get_args, get_type_hints

from valve_tune.train.spec import REFUSED, JobSpec, SpecError

ALSO = {
    "model": ("--model-name-or-path",),
    "data": ("--dataset-name", "--train-file"),
    "out": ("--output-dir",),
    "eval_data": ("--eval-file", "--validation-file"),
    "target_modules": ("--lora-target-modules",),
}
DEFAULT_PASSES = 3.0


def add(parser: argparse.ArgumentParser) -> None:
    hints = get_type_hints(JobSpec)
    for each in dataclasses.fields(JobSpec):
        names = both(f"--{each.name.replace('_', '-')}", *ALSO.get(each.name, ()))
        default = None if each.default is dataclasses.MISSING else each.default
        shown = (
            f" (default: {' '.join(default) if isinstance(default, tuple) else default})"
            if default not in (None, "")
            else ""
        )
        more: dict[str, Any] = {"dest": each.name, "default": argparse.SUPPRESS, "help": each.metadata["help"] + shown}
        kind = hints[each.name]
        if kind is bool:
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, **more)
        elif get_args(kind):
            parser.add_argument(*names, nargs="+", metavar="NAME", **more)
        else:
            parser.add_argument(
                *names, type=read_number if kind in (int, float) else str, metavar=kind.__name__, **more
            )
    parser.add_argument(*both("--num-train-epochs"), type=float, default=None, metavar="float", help=argparse.SUPPRESS)
    for name in REFUSED:
        parser.add_argument(*both(f"--{name.replace('_', '-')}"), nargs="?", action=Refuse, help=argparse.SUPPRESS)


def both(*names: str) -> list[str]:
    """Each flag with dashes and with underscores."""
    return list(dict.fromkeys(form for name in names for form in (name, "--" + name[2:].replace("-", "_"))))


def read_number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


class Refuse(argparse.Action):
    def __call__(self, *arguments: Any) -> None:
        raise SpecError(self.dest, REFUSED[self.dest])


def values(options: argparse.Namespace) -> dict[str, Any]:
    """What was said, and nothing that was not."""
    return {
        each.name: getattr(options, each.name) for each in dataclasses.fields(JobSpec) if hasattr(options, each.name)
    }
