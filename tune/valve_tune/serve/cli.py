"""`valve tune`: train an adapter as offline work, look after it, and hand it to a running service."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from valve_tune.base import shared
from valve_tune.base.weights import BadBase, read_folder
from valve_tune.options import TUNE_COMMAND, key_file, option, whole
from valve_tune.serve import flags, fleet, jobs, publish
from valve_tune.serve.folder import FolderError
from valve_tune.train.lines import DataError
from valve_tune.train.spec import DTYPES, SpecError

FAILED = 1
USAGE = 2  # as in valved.cli.exits: the arguments make no sense
ABOUT_A_JOB = {
    "watch": (jobs.watch, "Show the steps of a job until it ends."),
    "pause": (jobs.pause, "Stop a job between two tiles. It keeps its place."),
    "resume": (jobs.resume, "Let a paused job go on, or start a job again whose process is gone."),
    "cancel": (jobs.cancel, "End a job. Its last checkpoint stays."),
    "checkpoints": (jobs.checkpoints, "Show the checkpoints that a job has saved."),
}


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="valve tune", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=TUNE_COMMAND)
    run = commands.add_parser("run", help="Train an adapter. The same command with the same --out resumes the job.")
    flags.add(run)
    run.set_defaults(run=jobs.run)
    commands.add_parser("ls", help="Show all jobs.").set_defaults(run=jobs.ls)
    for name, (action, text) in ABOUT_A_JOB.items():
        one = commands.add_parser(name, help=text)
        one.add_argument("job", metavar="JOB", help="The folder of the job, or the folder's name.")
        one.set_defaults(run=action)
    one = commands.add_parser("share", help="Lay a base into shared memory, once for all jobs on this machine's CPUs.")
    one.add_argument("--model", required=True, metavar="DIR", help="The folder of the base model.")
    one.add_argument("--to", required=True, metavar="FILE", help="The file to write, for example /dev/shm/llama.")
    option(one, "--dtype", DTYPES[0], "The number format of the weights.", choices=DTYPES)
    one.set_defaults(run=share)
    add_publish(commands)
    add_serve(commands)
    fleet.add_to(commands)
    one = commands.add_parser("doctor", help="Check what training and publishing need.")
    one.add_argument("--model", default="", metavar="DIR", help="Check also whether this base can be trained.")
    one.set_defaults(run=doctor)
    return root


def add_publish(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = commands.add_parser("publish", help="Hand an adapter to a running vLLM or SGLang under a new version.")
    one.add_argument("job", metavar="JOB", help="The folder of the job, or the folder's name.")
    one.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="URL",
        help="The URL of a service; repeat it for more. Without it only the version's folder is made.",
    )
    one.add_argument(
        "--name", default="", help="The versions are called NAME-v1, NAME-v2 and so on. Default: the folder's name."
    )
    one.add_argument(
        "--checkpoint",
        type=whole(),
        default=None,
        metavar="STEP",
        help="Publish the checkpoint of this step number. Default: the newest adapter.",
    )
    option(one, "--keep", 2, "The number of versions that stay loaded.", metavar="N", type=whole(1))
    key_file(one, "--token-file", "The file that holds the key that the service asks for. Default: send none.")
    one.add_argument(
        "--no-probe", action="store_true", help="Do not measure the gap in decoding with a request of its own."
    )
    one.set_defaults(run=publish.command)


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = commands.add_parser("serve", help="Run an HTTP service in the shape of OpenAI's fine-tuning API.")
    one.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="NAME=DIR",
        help="A base that jobs may name. Repeat the option for several bases.",
    )
    one.add_argument(
        "--folder", required=True, metavar="DIR", help="The folder of the database, the files and the adapters."
    )
    option(one, "--host", "127.0.0.1", "Listen on this address.")
    option(one, "--port", 8090, "Listen on this port. 0 stands for any free one.", type=whole(0, 65535))
    key_file(one, "--token-file", "The file that holds the bearer token. It is needed where --host is not loopback.")
    one.set_defaults(run=serve)


def serve(options: argparse.Namespace) -> int:
    from valve_tune.serve.server import command

    return command(options)


def share(options: argparse.Namespace) -> int:
    try:
        dtype = getattr(torch, options.dtype)
        checksum = shared.publish(read_folder(Path(options.model), dtype), Path(options.to))
    except (BadBase, OSError) as error:
        raise FolderError(str(error)) from None
    print(f"{options.to}: {Path(options.to).stat().st_size:,} bytes, sha256 {checksum[:16]}; jobs take --share-weights")
    return 0


def doctor(options: argparse.Namespace) -> int:
    from valve_tune.serve.doctor import command

    return command(options.model)


def main(argv: list[str] | None = None) -> int:
    try:
        options = parser().parse_args(flags.dashed(sys.argv[1:] if argv is None else argv))
        return int(options.run(options))
    except (SpecError, DataError, FolderError) as error:
        print(f"valve tune: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return jobs.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return USAGE
    except OSError as error:  # a folder that cannot be made, a full disk
        said = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error
        print(f"valve tune: {said}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    raise SystemExit(main())
