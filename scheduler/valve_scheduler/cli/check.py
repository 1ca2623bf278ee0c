"""Can these rights read what Valve follows: one list of each kind, for `helm test` and for people."""

from collections.abc import Iterator

from valve_kube import names
from valve_kube.client import KubeClient
from valve_kube.errors import SchedulerError

from valve_scheduler.placement.views import OFFLINE_PODS

_KINDS = ("gpuharvestnodes", "harvestpolicies", "offlineprofiles", "offlineworkloads")


def followed() -> Iterator[tuple[str, dict[str, str]]]:
    yield "/api/v1/pods", OFFLINE_PODS
    for kind in _KINDS:
        yield f"{names.API_PATH}/{kind}", {}


async def check(client: KubeClient) -> None:
    """Print what is there; raises SchedulerError with all that could not be read."""
    failed = []
    for path, query in followed():
        try:
            items, _ = await client.list(path, query)
            print(f"{path}: {len(items)}")
        except SchedulerError as error:
            failed.append(f"{path}: {error}")
    if failed:
        raise SchedulerError("; ".join(failed))
