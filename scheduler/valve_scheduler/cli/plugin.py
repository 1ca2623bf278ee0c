"""`kubectl valve ...`: the commands of `valve cluster` as a plugin of kubectl, which finds this program by its name.

Everything goes through the API server with the kubeconfig that kubectl would take, so it needs no node and no valved.
"""

import sys

from valve_scheduler.cli import commands


def main() -> int:
    return commands.main(sys.argv[1:], program="kubectl valve")
