"""Objects that the API server's schema lets in, whatever stands in them: none ends a view, a round or a daemon's word.

Somebody who may edit Valve's objects writes nonsense into them now and then. The schemas say what gets past the API
server; everything that does is read by the extender, the controller and the daemons."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from valve_kube import names
from valve_kube.access import Access
from valve_kube.client import WHOLE, KubeClient
from valve_kube.shapes import Shape
from valve_scheduler.controller.rounds import Controller, ControllerSettings
from valve_scheduler.extender.service import ExtenderService, ExtenderSettings

Json = dict[str, Any]
CRDS = Path(__file__).parents[2] / "helm/valve/files/crds"
NAMES = ("n1", "n2", "default", "valve-pause", "valve-drain", "*", "")
TIMES = ("2026-01-01T00:00:00Z", "0000-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59Z")
NUMBERS = (0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 0.5, 1e308, -1e308, 5e-324)


def value_of(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the schema lets in; of those the odd ones."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        inner = schema.get("properties") or {}
        if not inner:
            more = value_of(schema.get("additionalProperties") or {})
            return st.dictionaries(st.sampled_from(NAMES), more, max_size=2)
        required = set(schema.get("required") or [])
        parts = {key: value_of(one) for key, one in inner.items()}
        return st.fixed_dictionaries(
            {key: part for key, part in parts.items() if key in required},
            optional={key: part for key, part in parts.items() if key not in required},
        )
    if kind == "array":
        low = schema.get("minItems", 0)
        return st.lists(value_of(schema["items"]), min_size=low, max_size=min(schema.get("maxItems", 3), max(low, 3)))
    if kind == "boolean":
        return st.booleans()
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", -float("inf")), schema.get("maximum", float("inf"))
        fitting = [n for n in NUMBERS if low <= n <= high and (kind == "number" or isinstance(n, int))]
        return st.sampled_from([*fitting, *(int(edge) for edge in (low, high) if abs(edge) < float("inf"))])
    if kind == "string":
        choices = TIMES if schema.get("format") == "date-time" else (*NAMES, "\N{SUPERSCRIPT TWO}", "9" * 40)
        return st.sampled_from([text[: schema.get("maxLength", 99)] for text in choices])
    return st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(NAMES)


def objects_of(kind: str) -> st.SearchStrategy[list[Json]]:
    """A few objects of a kind, each with a name of its own."""
    crd = yaml.safe_load((CRDS / f"{kind}.yaml").read_text(encoding="utf-8"))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = {key: part for key, part in schema["properties"].items() if key != "metadata"}
    body = value_of({**schema, "properties": parts})

    def named(bodies: list[Json]) -> list[Json]:
        kept = {"namespace": "default", "uid": "u", "resourceVersion": "3", "creationTimestamp": TIMES[0]}
        told = {"apiVersion": names.API_VERSION, "kind": crd["spec"]["names"]["kind"]}
        return [{**told, **one, "metadata": {**kept, "name": f"n{i + 1}"}} for i, one in enumerate(bodies)]

    return st.lists(body, min_size=1, max_size=3).map(named)


KINDS = sorted(path.stem for path in CRDS.glob("*.yaml"))
FLEET = st.fixed_dictionaries({kind: objects_of(kind) for kind in KINDS})


class Written(KubeClient):
    """An API server that has these objects, lists them once and tells of each again."""

    def __init__(self, fleet: Mapping[str, list[Json]]) -> None:
        super().__init__(Access(host="", port=0, tls=None, authorization=str))
        self._fleet = fleet

    async def request(self, method: str, path: str, **_: Any) -> Json:
        return {"metadata": {"name": "x", "uid": "u", "resourceVersion": "4"}}

    async def list(
        self, path: str, query: Any = None, accept: str = "", shape: Shape = WHOLE
    ) -> tuple[list[Json], str]:
        items = self._fleet.get(path.rpartition("/")[2], [])
        page = shape.page(json.dumps({"metadata": {"resourceVersion": "3"}, "items": items}).encode())
        return page.items, page.version

    async def watch(
        self, path: str, query: Mapping[str, str], *, silence_s: float, shape: Shape = WHOLE
    ) -> AsyncIterator[Json]:
        for kind in ("MODIFIED", "DELETED", "ADDED"):
            for item in self._fleet.get(path.rpartition("/")[2], []):
                yield shape.event(json.dumps({"type": kind, "object": item}).encode())
        await asyncio.Event().wait()


async def lived_through(fleet: Mapping[str, list[Json]]) -> None:
    """Every view takes every object, and every round of the controller is gone through."""
    client = Written(fleet)
    controller = Controller(client, ControllerSettings())
    extender = ExtenderService(client, ExtenderSettings())
    views = [asyncio.create_task(view.run()) for view in (*controller.caches.views, *extender.views)]
    for _ in range(100):  # turns of the loop: nothing here waits for anything else
        await asyncio.sleep(0)
    assert all(view.synced for view in (*controller.caches.views, *extender.views))
    assert not any(task.done() for task in views)
    for act in (
        controller.waiting.requeue,
        controller.apply_policies,
        controller.clear,
        controller.promises.round,
        controller.policies.judge,
        controller.forget,
        controller.free_stuck,
        controller.account,
        controller.measuring.store,
    ):
        await act()
    extender._refresh_gauges()
    for task in views:
        task.cancel()
    await asyncio.gather(*views, return_exceptions=True)


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=25)
@given(fleet=FLEET)
def test_an_object_that_the_schema_lets_in_never_ends_a_view_or_a_round(
    fleet: dict[str, list[Json]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        asyncio.run(lived_through(fleet))

    # What a round leaves out by name costs nobody else anything.
    told = [record for record in caplog.records if record.getMessage() != "object left out of the round"]
    assert [record.getMessage() + str(record.exc_info) for record in told] == []
