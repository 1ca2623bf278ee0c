"""A look at a card that computes nothing never says anything else than one that computes all of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from valved.model.ids import ClientId, GpuIndex
from valved.state.kept import KeptMemory, KvUse, OnlineNames
from valved.state.saved import SavedPeak

GPU, SECOND = GpuIndex(0), 1_000_000_000
REMEMBERED_NS = 10 * SECOND
CLIENTS, PIDS = {ClientId(1): "chat", ClientId(2): "code"}, {11: "chat", 12: "code", 13: "chat"}
names = st.builds(
    OnlineNames,
    of_client=st.just(CLIENTS),
    of_pid=st.sampled_from([PIDS, {11: "chat"}, {}]),
    untold=st.sampled_from([frozenset(), frozenset({"chat"})]),
)
held = st.dictionaries(st.sampled_from([*PIDS, 99]), st.sampled_from([0, 20, 30]), max_size=3)
kv_uses = st.builds(KvUse, mapped=st.sampled_from([0, 10, 40]), coming=st.sampled_from([0, 10]), bare=st.just(5))
kv = st.dictionaries(st.sampled_from(["chat", "code"]), kv_uses, max_size=2)
ages = st.lists(st.sampled_from([0, 1, SECOND, 4 * SECOND, REMEMBERED_NS, REMEMBERED_NS + 1]), min_size=1, max_size=4)
saved = st.builds(
    SavedPeak, gpu=st.just(0), name=st.sampled_from(["chat", "old"]), plain=st.just((50, 0)), kv=st.just((7, 0))
)
change = st.one_of(
    st.tuples(st.just("names"), names),
    st.tuples(st.just("by_pid"), st.one_of(st.none(), held, held)),
    st.tuples(st.just("kv"), kv),
    st.tuples(st.just("saved"), st.lists(saved, max_size=1)),
    st.tuples(st.just("is_read"), st.booleans()),
)


@given(
    st.lists(st.tuples(change, ages), max_size=12),
    st.sampled_from([0, 60]),
    st.sampled_from([0, REMEMBERED_NS, REMEMBERED_NS]),
)
def test_what_is_not_computed_anew_never_differs(history, stated, remember_ns):
    """`history`: one thing changes, and it is looked at again and again, after these times."""
    quick, full = (KeptMemory([GPU], stated, remember_ns) for _ in range(2))
    now_ns = 1
    now = {"names": OnlineNames(of_client=CLIENTS, of_pid=PIDS, untold=frozenset()), "by_pid": {11: 30, 12: 20}}
    now |= {"kv": {}, "is_read": True}
    for (what, value), waits in history:
        if what == "saved":
            for one in (quick, full):
                one.peaks.restore(value, now_ns)
                one.look(GPU, now["names"], now["by_pid"], now["kv"], now_ns, is_read=False)
        else:
            now[what] = value
        for wait_ns in waits:
            now_ns += wait_ns
            full._gpus[GPU].went_by = None
            for one in (quick, full):
                is_read = now["is_read"] and now["by_pid"] is not None
                one.look(GPU, now["names"], now["by_pid"], now["kv"], now_ns, is_read=is_read)
            assert quick.of(GPU) == full.of(GPU)
            assert quick.peaks.last(GPU) == full.peaks.last(GPU)
            assert {one.name: one for one in quick.peaks.saved()} == {one.name: one for one in full.peaks.saved()}
