"""The router's training queue as a process, without its proxy: python fleet_router.py FOLDER PORT SILENT_S"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scheduler"))

from aiohttp import web
from valve_router.replicas import Replicas
from valve_router.settings import RouterSettings
from valve_router.training.api import TrainingApi
from valve_router.training.desk import Desk
from valve_router.training.ledger import FleetBooks


def main(folder: str, port: str, silent_s: str) -> None:
    settings = RouterSettings(replicas=("http://127.0.0.1:9",))
    training = web.Application()
    ledger = FleetBooks(Path(folder), silent_s=float(silent_s))
    TrainingApi(settings, ledger, Desk(settings, Replicas(settings, lambda: 0.0))).add_to(training)
    app = web.Application(client_max_size=settings.body_bytes)
    app.add_subapp("/route/training", training)
    web.run_app(app, host="127.0.0.1", port=int(port), print=lambda *_: print("listens", flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
