"""The fields of a job as flags, named as people know them from TRL and peft. Underscores are taken for dashes."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from valve_tune.train.spec import REFUSED, JobSpec, SpecError

ALSO = {
    "model": ("--model-name-or-path",),
    "data": ("--dataset-name", "--train-file"),
    "out": ("--output-dir",),
    "eval_data": ("--eval-file", "--validation-file"),
    "target_modules": ("--lora-target-modules",),
}
VALUES = {"model": "DIR", "data": "FILE", "out": "DIR", "eval_data": "FILE", "share_weights": "SERVICE"}
DEFAULT_PASSES = 3.0


def add(parser: argparse.ArgumentParser) -> None:
    hints = get_type_hints(JobSpec)
    for each in dataclasses.fields(JobSpec):
        names = (f"--{each.name.replace('_', '-')}", *ALSO.get(each.name, ()))
        default = None if each.default is dataclasses.MISSING else each.default
        shown = (
            f" Default: {' '.join(default) if isinstance(default, tuple) else default}."
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
            parser.add_argument(*names, type=str if kind is str else read_number, metavar=shown_value(each), **more)
    parser.add_argument("--num-train-epochs", type=float, default=None, help=argparse.SUPPRESS)
    for name in REFUSED:
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="?", action=Refuse, help=argparse.SUPPRESS)


def shown_value(each: dataclasses.Field[Any]) -> str:
    choices = each.metadata.get("choices")
    return "{" + ",".join(choices) + "}" if choices else VALUES.get(each.name, "N")


def dashed(arguments: Sequence[str]) -> list[str]:
    """`--max_steps=4` is `--max-steps=4`."""
    parts = (one.partition("=") for one in arguments)
    return [
        name.replace("_", "-") + equals + value if name.startswith("--") else name + equals + value
        for name, equals, value in parts
    ]


def read_number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


class Refuse(argparse.Action):
    def __call__(self, *arguments: Any) -> None:
        raise SpecError(self.dest, REFUSED[self.dest])


def values(options: argparse.Namespace) -> dict[str, Any]:
    """What was said, and nothing that was not."""
    return {
        each.name: getattr(options, each.name) for each in dataclasses.fields(JobSpec) if hasattr(options, each.name)
    }
