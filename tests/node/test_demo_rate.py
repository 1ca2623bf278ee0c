"""What the offline job reports as its rate is what it worked, and never what the check of its checksum takes."""

from __future__ import annotations

import json

from valve_tools.demo.node import EmulatedNode
from valve_tools.demo.rounds import OFFLINE, last_summary
from valve_tools.emulator.node import Options


def test_the_rate_of_a_job_never_counts_the_check_of_its_checksum(tmp_path):
    """The check takes as long as the kernels here: counted, it would halve the rate and double a harvested share. The
    last report is made before it."""
    out = tmp_path / "offline.out"
    argv = [str(OFFLINE), "--unit-us", "1", "--units", "20", "--rounds", "30000", "--words", "64", "--report", "1000"]
    with EmulatedNode(tmp_path, options=Options()) as node:
        assert node.run("", argv, name="offline", out=out).wait() == 0

    (last,) = [json.loads(line) for line in out.read_text().splitlines() if "now_s" in line]
    summary = last_summary(out)
    assert (last["units"], last["t_s"]) == (summary["units"], summary["wall_s"])
