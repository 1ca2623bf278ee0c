"""A leader stops with its lease, whatever it was about."""

import asyncio

import pytest
from valve_kube.access import Access
from valve_kube.client import Json, KubeClient, Unreachable
from valve_kube.lease import Lease


class Api(KubeClient):
    """Takes every write to the lease until it is gone."""

    def __init__(self) -> None:
        super().__init__(Access(host="", port=0, tls=None, authorization=str))
        self.is_gone = False

    async def request(self, method: str, path: str, **_: object) -> Json:
        if self.is_gone:
            raise Unreachable("gone")
        return {"metadata": {}, "spec": {}}


def test_a_round_never_goes_on_beside_the_next_leader() -> None:
    """A round of many evictions at a slow API server outlived its lease, and spent the next leader's budget, too."""

    async def run() -> tuple[int, int, bool]:
        api = Api()
        lease, done = Lease(api, "ns", "l", "me", duration_s=0.3), [0]
        renewing = asyncio.create_task(lease.run())
        while not lease.held:
            await asyncio.sleep(0.001)

        async def evict_many() -> None:
            while True:
                done[0] += 1
                await asyncio.sleep(0.001)

        api.is_gone = True
        await lease.while_held(evict_many())
        held, at_end = lease.held, done[0]
        await asyncio.sleep(0.02)
        renewing.cancel()
        return at_end, done[0], held

    at_end, later, held = asyncio.run(run())

    assert (later, held) == (at_end, False)


def test_a_round_that_misses_its_cancellation_never_goes_on_beside_the_next_leader() -> None:
    """As wait_for does before Python 3.12 where the answer comes at that moment."""

    async def run() -> int:
        lease, done, missed = Lease(Api(), "ns", "l", "me"), 0, list[bool]()

        async def evict_many() -> None:
            nonlocal done
            for _ in range(1000):
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    if missed:
                        raise
                    missed.append(True)
                done += 1

        lease._held_until_s = asyncio.get_running_loop().time() + 0.05
        await lease.while_held(evict_many())
        return done

    assert asyncio.run(run()) < 1000


def test_what_a_round_raises_is_never_lost() -> None:
    async def run() -> None:
        lease = Lease(Api(), "ns", "l", "me")
        await lease._try()

        async def fail() -> None:
            raise RuntimeError("defect")

        await lease.while_held(fail())

    with pytest.raises(RuntimeError, match="defect"):
        asyncio.run(run())
