"""Writes the account of each namespace: what its offline pods got and its online pods lent, added up over daemons."""

import logging
from dataclasses import replace

from valve_kube import names
from valve_kube.client import ApiError, Json, KubeClient, Unreachable
from valve_kube.errors import InvalidObject
from valve_kube.objects import offline_pod
from valve_kube.owners import owner_name
from valve_kube.reflector import Store

from valve_scheduler.controller.accounts import Entry, Worth, charge, entries_of, spread, total_of
from valve_scheduler.controller.apart import apart, each
from valve_scheduler.controller.hands import Hands
from valve_scheduler.controller.tally import SavedCounter
from valve_scheduler.placement.state import ClusterState

log = logging.getLogger(__name__)

WORTH_KEPT_S = 600.0


class AccountBook:
    def __init__(
        self,
        client: KubeClient,
        hands: Hands,
        state: ClusterState,
        tally: SavedCounter,
        pods: Store,
        nodes: Store,
        accounts: Store,
    ) -> None:
        self._client, self._hands, self._state, self._tally = client, hands, state, tally
        self._pods, self._nodes, self._accounts = pods, nodes, accounts
        self._worths: dict[str, tuple[Worth, float]] = {}  # by UID, and when the pod was seen last

    async def round(self, now_s: float) -> None:
        """Add what the nodes counted since the last look to the account of each namespace."""
        worth_of = await each(self._pods.items.values(), self._worth)
        known = {pod["metadata"]["uid"]: (worth, now_s) for pod, worth in worth_of}
        # A node reports a pod for a while after it ended, when the watch shows it no more.
        ended = {uid: (worth, at_s) for uid, (worth, at_s) in self._worths.items() if now_s - at_s < WORTH_KEPT_S}
        self._worths = {**ended, **known}
        worths = {uid: worth for uid, (worth, _) in self._worths.items()}
        entries = entries_of(self._nodes.items.values(), worths)
        for namespace in sorted({*entries, *(namespace for namespace, _ in self._accounts.items)}):
            with apart({"kind": "HarvestAccount", "metadata": {"namespace": namespace}}):
                await self._account_of(namespace, entries.get(namespace, []))

    async def _account_of(self, namespace: str, entries: list[Entry]) -> None:
        held = {name: item for (where, name), item in self._accounts.items.items() if where == namespace}
        statuses = {name: dict(item.get("status") or {}) for name, item in held.items()}
        parts = spread(statuses, entries)
        for name in sorted({*held, *parts}):
            before = statuses.get(name) or {}
            status = statuses[name] = charge(before, parts.get(name, []))
            if status != before and (name in parts or before):
                await self._write_account(namespace, name, held.get(name, {}), status)
        self._tally.show(namespace, total_of(statuses.values())["offline"])

    def _worth(self, pod: Json) -> Worth:
        """Of an offline pod, with the GPU-seconds that one of its tokens costs on GPUs of its own."""
        whose = Worth(namespace=pod["metadata"]["namespace"], owner=owner_name(pod))
        try:
            wish = offline_pod(pod)
        except InvalidObject:
            return whose
        profile = self._state.asked.profile(wish)

        return replace(whose, saved_per_token=wish.gpus / profile.standalone_tokens_per_s) if profile else whose

    async def _write_account(self, namespace: str, name: str, held: Json, status: Json) -> None:
        path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/harvestaccounts"
        if not held:
            body = {"apiVersion": names.API_VERSION, "kind": "HarvestAccount", "metadata": {"name": name}}
            try:
                held = await self._client.request("POST", path, body=body)
            except (ApiError, Unreachable) as error:  # made by the round before and not in our view yet, or later
                log.info("account not made", extra={"namespace": namespace, "error": str(error)})
                return
        # The version makes this fail where another controller wrote since: an amount is never added twice.
        version = {"metadata": {"resourceVersion": held["metadata"]["resourceVersion"]}}
        await self._hands.patch(f"{path}/{name}/status", {**version, "status": status})
