"""The router's training queue as a process, without its proxy: python fleet_router.py FOLDER PORT SILENT_S

The file FOLDER/clock, if there is one, says what time it is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scheduler"))

from aiohttp import web
from valve_router.replicas import Replicas
from valve_router.settings import RouterSettings
from valve_router.training import api
from valve_router.training.api import TrainingApi
from valve_router.training.desk import Desk
from valve_router.training.ledger import FleetBooks


def main(folder: str, port: str, silent_s: str) -> None:
    settings = RouterSettings(replicas=("http://127.0.0.1:9",), training_silent_s=float(silent_s))
    clock = Path(folder) / "clock"
    if clock.exists():
        api.SWEEP_S = 0.02
        api.time = SimpleNamespace(time=lambda: float(clock.read_text()), monotonic=time.monotonic)
    training = web.Application()
    ledger = FleetBooks(Path(folder), silent_s=float(silent_s))
    TrainingApi(settings, ledger, Desk(settings, Replicas(settings, lambda: 0.0))).add_to(training)
    app = web.Application(client_max_size=settings.body_bytes)
    app.add_subapp("/route/training", training)
    web.run_app(app, host="127.0.0.1", port=int(port), print=lambda *_: print("listens", flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
