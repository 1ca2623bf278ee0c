"""vLLM's own benchmark client, imported once: a line of arguments (JSON) on standard input is one benchmark, and a line
on standard output says that it is over. Runs inside the engines' environment. A client that is started for every
benchmark would import torch beside the engines it is to measure.
"""

from __future__ import annotations

import contextlib
import json
import sys


def main() -> None:
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    print("ready", flush=True)
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            serve.main(parser.parse_args(json.loads(line)))
        print("over", flush=True)


if __name__ == "__main__":
    main()
