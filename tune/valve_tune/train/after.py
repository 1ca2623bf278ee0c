"""A process that looks at shared weights after a trainer was killed: what killed it may have come with a stray write,
which the service would go on computing with. Until then it only waits; it holds no torch and maps nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from valve_tune.train.spec import JobSpec

SAID = "shared-base.txt"


def main() -> int:
    told = [json.loads(line) for line in sys.stdin.buffer.read().splitlines()]
    if len(told) != 1:
        return 0  # it has looked, or was killed before it began
    import torch

    from valve_tune.train.build import shared_base

    spec = JobSpec.from_json(told[0]["spec"])
    try:
        now = shared_base(spec, "cuda" if torch.cuda.is_available() else "cpu").digest
    except (OSError, ValueError) as error:
        found = f"the shared weights could not be checked: {error}"
    else:
        found = "the shared weights are as they were"
        if now != told[0]["digest"]:
            found = f"THE WEIGHTS OF {spec.share_weights} HAVE CHANGED: start that service and its weight daemon again"
    said = f"valve tune: {spec.out}: the trainer was killed; {found}"
    print(said, file=sys.stderr)
    Path(spec.out, SAID).write_text(said + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
