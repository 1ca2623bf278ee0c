"""valved's entry: arguments, settings, the run folder and its lock, and then the daemon (daemon.py) until it ends."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
from importlib import import_module
from pathlib import Path

import msgspec

from valved import logs, paths
from valved.config import Config, effective, load_config
from valved.daemon import run
from valved.errors import ConfigError, ValveError, cure, short, told
from valved.machine.cardlock import CardLock
from valved.machine.ports import GatePort
from valved.machine.priority import hurry
from valved.model.ids import Mode
from valved.node import turn
from valved.state import saved as state

log = logging.getLogger("valved")

EXIT_FAILED, EXIT_CONFIG = 1, 78  # EX_CONFIG of sysexits.h: a restart would not help
LOOP_NS = 2_000_000_000  # far beyond any pass of the loop; below the patience of an online process that starts
IN_THE_WAY = "see who may use that file or device, and whether something else has its name"
GC_THRESHOLDS = (20_000, 20, 50)  # our values hold no cycles; full collections over thousands of channels cost most
SWITCH_S = 0.0001  # so long may a thread that computes keep the loop waiting; Python's own is 5 ms


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="valved", description="Valve's node daemon")
    parser.add_argument(
        "--run-dir", type=Path, help="The folder of sockets and state. Default: /run/valve, or the user's own."
    )
    parser.add_argument(
        "--config", type=Path, help="The TOML configuration file (docs/configuration.md). Default: none."
    )
    parser.add_argument(
        "--mode",
        choices=[mode.value for mode in Mode],
        help="How far valved may go. Default: as configured, or as set since.",
    )
    parser.add_argument(
        "--default-mode",
        choices=[mode.value for mode in Mode],
        help="The same where none was set since: for units, which say it at each start. Default: as configured.",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        help="Serve Prometheus metrics on this loopback port. 0 switches them off. Default: as configured.",
    )
    parser.add_argument("--trace-file", help="Record every event and decision in this file. Default: record none.")
    parser.add_argument(
        "--node", help="The name of the Kubernetes node that this is. Default: this is no Kubernetes node."
    )
    parser.add_argument("--wait", action="store_true", help="Wait until the valved that runs here now has ended.")
    parser.add_argument(
        "--replace", action="store_true", help="Replace the valved that runs here now, and take over its state."
    )
    parser.add_argument(
        "--foreground",
        action="store_true",
        help="This is accepted for systemd units and changes nothing: valved never forks.",
    )
    return parser.parse_args(argv)


def native_gate(config: Config) -> GatePort:
    from valved.gate.adapter import NativeGate, NativeSettings

    return NativeGate(
        NativeSettings(
            lease_ns=config.lease_ns,
            loop_ns=LOOP_NS,
            hang_ns=round(config.hang_ms * 1e6),
            spin_ns=round(config.spin_us * 1e3),
            quiet_us=config.quiet_us,
            fifo_priority=config.fifo_priority,
        )
    )


def _import_early(config: Config) -> None:
    """A second of imports, done while the predecessor still gates: shims act by themselves when a lease is over."""
    import_module("valved.rpc.server")
    if config.kube.node:
        import_module("valved.kube.room")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    mode = options.mode or options.default_mode
    flags = {"mode": mode, "metrics_port": options.metrics_port, "trace_file": options.trace_file}
    if options.run_dir is not None:
        flags["run_dir"] = str(options.run_dir)
    cards = CardLock()
    try:
        config = load_config(options.config, flags)
        if options.node:
            config = msgspec.structs.replace(config, kube=msgspec.structs.replace(config.kube, node=options.node))
        run_dir = Path(config.run_dir) if config.run_dir else paths.run_dir()
        if why := paths.unfit(run_dir):
            raise ConfigError(f"run_dir = {short(str(run_dir))}: {why}", field="run_dir")
        logs.set_up(config.log_level, run_dir / paths.LOG_FILE)
        folder = state.RunFolder(run_dir.absolute())
        if options.wait:
            _import_early(config)
            asyncio.run(turn.wait_for_turn(folder, config.metrics_host, config.metrics_port))
        else:
            folder.take(replace=options.replace)
        cards.take()
    except (ValveError, OSError) as error:
        next_step = cure(error, IN_THE_WAY) if isinstance(error, OSError) else error.next_step
        print(f"valved: {told(error)}\n  next: {next_step}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ValveError) else EXIT_FAILED
    mode_flag = Mode(options.mode) if options.mode else None
    try:
        folder.sign()
    except OSError as error:  # a full disk: the lock says whose folder this is
        log.warning(
            "valved.pid cannot be written: --replace will not find this valved", extra={"facts": {"error": told(error)}}
        )
    log.info("settings", extra={"facts": {**effective(config), "run_dir": str(folder.path)}})
    gc.freeze()  # what the imports made lives for ever
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)
    if config.loop_priority and not hurry(config.loop_priority):
        log.warning("no real time for the loop", extra={"facts": {"loop_priority": config.loop_priority}})
    from valved.machine.processes import LinuxProcesses

    try:
        gate = native_gate(config)
        if asyncio.run(run(config, folder, gate, LinuxProcesses(), mode_flag)):
            gate.close()
    except OSError as error:
        log.error("failed", extra={"facts": {"error": told(error), "next": cure(error, IN_THE_WAY)}})
        return EXIT_FAILED
    finally:
        cards.release()
        folder.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
