"""The loop in a thread of its own, where there is nothing to make a loop of."""

from __future__ import annotations

import asyncio
import errno
import gc
import warnings

import pytest

from valved.rpc.aside import LoopAside


def test_a_valved_that_has_no_descriptor_for_a_loop_never_leaves_a_coroutine_that_nobody_awaits(monkeypatch):
    def refuse(life):
        raise OSError(errno.EMFILE, "too many open files")

    async def story():
        monkeypatch.setattr(asyncio, "run", refuse)
        with pytest.raises(OSError, match="too many"):
            await LoopAside("test").begin()

    run = asyncio.run
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(story())
        gc.collect()

    assert not [each for each in seen if "never awaited" in str(each.message)]
