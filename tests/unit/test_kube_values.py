"""The pure parts of the Kubernetes room: slots, CDI descriptions, series, counters of offline pods, shim files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from valve_scheduler.model import pair_alignment

from valved.kube import cdi, seriesfile, shimfiles
from valved.kube.offline import OfflineBook, Reading
from valved.kube.series import NodeSeries
from valved.kube.slots import health, prefer, slot_ids

SLOTS = slot_ids(4)
TOOLKIT = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "containerEdits": {"mounts": [{"hostPath": "/lib/libcuda.so", "containerPath": "/lib/libcuda.so"}]},
    "devices": [
        {
            "name": f"GPU-{name}",
            "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{name}"}, {"path": "/dev/nvidiactl"}]},
        }
        for name in "abc"
    ],
}


@given(st.sets(st.sampled_from(SLOTS)), st.integers(-1, 6))
def test_slots_in_use_stay_healthy_as_long_as_any_are(in_use: set[str], harvestable: int) -> None:
    offered = health(SLOTS, in_use, harvestable)
    healthy = {slot for slot, is_healthy in offered.items() if is_healthy}

    assert len(healthy) == min(max(0, harvestable), len(SLOTS))
    assert healthy <= in_use or in_use <= healthy


def test_the_slots_released_longest_ago_are_preferred() -> None:
    assert prefer(SLOTS, [SLOTS[3]], 3, {SLOTS[0]: 2, SLOTS[1]: 1}) == (SLOTS[3], SLOTS[2], SLOTS[1])


def test_gpus_are_dealt_to_the_slots_of_a_container_in_order() -> None:
    specs = cdi.slot_specs(["s0", "s1"], ["GPU-b", "GPU-a"], TOOLKIT)
    edits = {slot: spec["devices"][0]["containerEdits"] for slot, spec in specs.items()}

    assert [node["path"] for node in edits["s0"]["deviceNodes"]] == ["/dev/nvidiab", "/dev/nvidiactl"]
    assert [node["path"] for node in edits["s1"]["deviceNodes"]] == ["/dev/nvidiaa", "/dev/nvidiactl"]
    assert "mounts" in edits["s0"]
    assert "mounts" not in edits["s1"]


def test_one_slot_may_stand_for_several_gpus_and_the_other_way_round() -> None:
    both = cdi.slot_specs(["s0"], ["GPU-a", "GPU-b"], TOOLKIT)["s0"]["devices"][0]["containerEdits"]
    spare = cdi.slot_specs(["s0", "s1"], ["GPU-a"], TOOLKIT)["s1"]["devices"][0]["containerEdits"]

    assert [node["path"] for node in both["deviceNodes"]] == ["/dev/nvidiaa", "/dev/nvidiactl", "/dev/nvidiab"]
    assert spare == {"env": ["VALVE_SLOT=s1"]}  # CDI refuses a device without any edit


def test_a_gpu_that_the_toolkit_does_not_describe_is_refused_by_name() -> None:
    with pytest.raises(cdi.NoDescription, match="no device GPU-z"):
        cdi.slot_specs(["s0"], ["GPU-z"], TOOLKIT)


def test_descriptions_are_written_whole_found_and_removed(tmp_path: Path) -> None:
    cdi.write(tmp_path, "s0", {"kind": cdi.KIND})
    (tmp_path / "nvidia.yaml").write_text("kind: nvidia.com/gpu\ndevices: []\n")
    (tmp_path / "broken.yaml").write_text("{")

    assert cdi.present(tmp_path) == {"s0"}
    assert json.loads((tmp_path / "valve.gpu-s0.json").read_text()) == {"kind": "valve.gpu/gpu"}
    assert cdi.read_toolkit([tmp_path]) == {"kind": "nvidia.com/gpu", "devices": []}

    cdi.remove(tmp_path, "s0")

    assert cdi.present(tmp_path) == frozenset()


def test_alignment_is_that_of_the_scheduler_s_model() -> None:
    busy = np.random.default_rng(3).random((500, 3)) < [0.3, 0.5, 0.1]
    series = NodeSeries(3)
    for step, row in enumerate(busy):
        series.beat(1000 + step / 10, [bool(value) for value in row])

    expected = pair_alignment(busy)[np.triu_indices(3, 1)].round(4)

    assert series.alignment() == [float(value) for value in expected]


def test_windows_of_idle_time_end_where_they_should() -> None:
    series = NodeSeries(1)
    for second in range(7200):
        series.book(second, [1.0], [1.0 if second >= 7200 - 600 else 0.25])

    windows = series.windows(0)

    assert windows["1m"] == windows["10m"] == 1.0
    assert windows["1h"] == pytest.approx((600 + 3000 * 0.25) / 3600, abs=1e-4)
    assert "24h" not in windows


def test_a_window_that_was_not_seen_is_never_published() -> None:
    """Seconds after a restart were the hour that placement went by."""
    series = NodeSeries(1)
    for second in range(100, 110):
        series.book(second, [1.0], [1.0])

    assert dict(series.windows(0)) == {"1m": 1.0}


def test_an_hour_that_nobody_could_judge_is_never_counted_as_busy() -> None:
    """A pause, a guard, a breaker that rests: neither idle time nor time that online needed."""
    series = NodeSeries(1)
    for second in range(86400):
        is_judged = second < 86400 - 3600
        series.book(second, [float(is_judged)], [0.7 * is_judged])
        series.memory(second, 0, 40 * is_judged, 80 * is_judged)

    assert dict(series.windows(0)) == {"24h": 0.7}
    assert sum(series.histogram(0)) == pytest.approx(1.0)


def test_a_restart_never_forgets_the_hour_and_the_day(tmp_path: Path) -> None:
    before, after = NodeSeries(2), NodeSeries(2)
    for second in range(0, 50_000, 10):
        before.book(second, [10.0, 10.0], [4.0, 9.0])
        before.beat(second, [True, second % 20 == 0])
        before.memory(second, 1, 40, 80)
        before.memory(second, 1, 30, 80, is_held=True)
    seriesfile.write(tmp_path / "s", before.saved(), "boot", ["a", "b"])

    assert seriesfile.read(tmp_path / "s", after, "boot", ["a", "b"], 50_030.0) == ""
    for gpu in range(2):
        assert after.windows(gpu) == before.windows(gpu)
        assert after.histogram(gpu) == before.histogram(gpu)
        assert after.online_memory(gpu) == before.online_memory(gpu)
    assert after.alignment() == before.alignment()


@pytest.mark.parametrize(
    ("boot", "gpus", "now_s"), [("other", ["a"], 900.0), ("boot", ["b"], 900.0), ("boot", ["a"], 5.0)]
)
def test_the_series_of_another_boot_card_or_clock_is_never_taken_over(
    tmp_path: Path, boot: str, gpus: list[str], now_s: float
) -> None:
    before, after = NodeSeries(1), NodeSeries(1)
    before.book(800.0, [1.0], [1.0])
    seriesfile.write(tmp_path / "s", before.saved(), "boot", ["a"])

    assert seriesfile.read(tmp_path / "s", after, boot, gpus, now_s)
    assert not after.windows(0)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"\x80\x04pickle"])
def test_a_torn_series_is_never_a_reason_not_to_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s").write_bytes(content)

    assert seriesfile.read(tmp_path / "s", NodeSeries(1), "boot", ["a"], 900.0)


def test_a_silence_of_an_hour_leaves_nothing_of_before() -> None:
    series = NodeSeries(2)
    series.book(5, [1.0, 1.0], [1.0, 1.0])
    series.beat(5, [True, False])
    series.memory(5, 0, 40, 80)

    series.book(5 + 4000, [1.0, 1.0], [0.0, 0.5])

    assert (series.idle(0, 3600), series.idle(1, 3600)) == (0.0, 0.5)
    assert series.alignment() == [1.0]
    assert sum(series.histogram(0)) == 1.0, "of the day"


def test_free_memory_falls_into_32_bins_of_the_card() -> None:
    series = NodeSeries(1)
    for free in (0, 79, 80, 200):
        series.memory(0, 0, free, 80)

    histogram = series.histogram(0)

    assert (len(histogram), histogram[0], histogram[31]) == (32, 0.25, 0.75)


def test_what_online_uses_counts_only_while_it_holds_the_gpu() -> None:
    series = NodeSeries(2)
    for second in range(4000):
        is_held = second % 2 == 0
        series.memory(second, 0, 20 if is_held and second < 300 else 60, 80, is_held=is_held)

    online = series.online_memory(0)

    assert (online["1h"][8], online["1h"][24]) == (1.0, 0.0), "the first minutes are over an hour ago"
    assert online["24h"][24] == pytest.approx(150 / 2000)
    assert series.histogram(0)[24] == 1.0
    assert series.online_memory(1) == {}


def test_online_memory_beyond_the_card_falls_into_its_last_bin() -> None:
    series = NodeSeries(1)
    for free in (-5, 0, 80, 200):
        series.memory(0, 0, free, 80, is_held=True)

    online = series.online_memory(0)["1h"]

    assert (len(online), online[0], online[31]) == (32, 0.5, 0.5)


def test_an_upgrade_from_a_release_without_online_memory_never_forgets_the_hour(tmp_path: Path) -> None:
    before, after = NodeSeries(1), NodeSeries(1)
    for second in range(0, 3600, 10):
        before.book(second, [10.0], [4.0])
        before.memory(second, 0, 40, 80)
    old = {name: table for name, table in before.saved().items() if "online" not in name}
    seriesfile.write(tmp_path / "s", old, "boot", ["a"])
    after.memory(3600, 0, 40, 80, is_held=True)

    assert seriesfile.read(tmp_path / "s", after, "boot", ["a"], 3600.0) == ""
    assert after.windows(0) == before.windows(0)
    assert after.online_memory(0) == {}


def reading(harvest_s: float, service: int = 7, tokens: int | None = None, gpus: int = 1, work: bool = True) -> Reading:
    return Reading(pod_uid="u", service=service, harvest_s=harvest_s, gpus=gpus, tokens=tokens, has_work=work)


def test_an_offline_pod_s_counters_outlive_its_processes() -> None:
    book = OfflineBook()
    for now_s, one in [(0, reading(0)), (10, reading(4, tokens=100)), (20, reading(1, service=8, tokens=30))]:
        book.read([one], now_s)

    facts = book.facts({"u"})[0]

    assert (facts.harvest_s, facts.useful_tokens, facts.demand_s) == (5, 130, 20)


def test_a_successor_goes_on_from_the_last_report() -> None:
    book = OfflineBook()
    book.seed({"offline": [{"podUID": "u", "harvestSeconds": 50, "demandSeconds": 90, "usefulTokens": 7}]})
    book.adopt(7, harvest_s=50, tokens=7)
    book.read([reading(50, tokens=7)], 0)
    book.read([replace(reading(53, tokens=9, gpus=3), gated_s=1.5, stops=2)], 5)
    book.seed({"offline": [{"podUID": "u", "harvestSeconds": 999}]})  # its own words come back

    facts = book.facts({"u"})[0]

    assert (facts.harvest_s, facts.runnable_s, facts.useful_tokens, facts.demand_s) == (53, 1, 9, 95)
    assert (facts.gated_s, facts.preemptions) == (1.5, 2)


def test_lost_tokens_are_counted_across_engines_and_our_restarts() -> None:
    """An engine goes on counting when it attaches to a successor; a new engine of the pod begins at zero."""
    book = OfflineBook()
    book.seed({"offline": [{"podUID": "u", "tokensLost": 40}]})
    book.adopt(7, harvest_s=0, tokens=0)
    for now_s, lost in enumerate([None, 40, 45, None, 45, 50, 3]):
        book.read([replace(reading(0), lost=lost)], now_s)

    assert book.facts({"u"})[0].tokens_lost == 40 + 10 + 3


def test_without_a_hook_nothing_is_said_of_lost_tokens() -> None:
    book = OfflineBook()
    book.read([reading(0)], 0)

    assert book.facts({"u"})[0].tokens_lost is None


def test_time_without_work_is_no_demand_and_pods_that_are_gone_are_forgotten() -> None:
    book = OfflineBook()
    book.read([reading(0, work=False)], 0)
    book.read([reading(0, work=False)], 60)

    assert book.facts({"u"})[0].demand_s == 0
    assert book.facts(set()) == ()
    assert book.facts({"u"}) == ()


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    source = tmp_path / "lib"
    source.mkdir()
    for name in shimfiles.LIBRARIES:
        (source / name).write_text(name)
    return source


def test_the_shim_is_installed_beside_older_ones_never_over_them(tmp_path: Path, libraries: Path) -> None:
    folder = tmp_path / "shim"
    old = shimfiles.install(libraries, folder, "1.0")
    (libraries / "libvalve.so").write_text("rebuilt")

    new = shimfiles.install(libraries, folder, "1.0")

    assert old != new
    assert (old / "libvalve.so").read_text() == "libvalve.so"
    assert (folder / "current/libvalve.so").read_text() == "rebuilt"
    assert shimfiles.install(libraries, folder, "1.0") == new


def test_no_version_is_removed_and_none_kept_in_silence_while_some_process_cannot_be_asked_what_it_maps(
    tmp_path: Path, libraries: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, proc = tmp_path / "shim", tmp_path / "proc"
    for version in ("1", "2"):
        shimfiles.install(libraries, folder, version)
    (proc / "77").mkdir(parents=True)
    (proc / "77/maps").mkdir()  # an OSError to whoever reads it

    assert shimfiles.remove_unused(folder, proc) == []
    assert [record.getMessage() for record in caplog.records] == ["old shims kept"]
    assert str(proc / "77/maps") in caplog.records[0].facts["error"]


def test_a_version_that_a_process_maps_stays(tmp_path: Path, libraries: Path) -> None:
    folder, proc = tmp_path / "shim", tmp_path / "proc"
    homes = []
    for version in ("1", "2", "3"):
        homes.append(shimfiles.install(libraries, folder, version))
    (proc / "77").mkdir(parents=True)
    (proc / "77/maps").write_text(f"7f00-7f01 r-xp 0 00:00 1 /var/lib/valve/shim/{homes[0].name}/libvalve.so\n")

    removed = shimfiles.remove_unused(folder, proc)

    assert removed == [homes[1].name]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [homes[0].name, homes[2].name, "current", shimfiles.LOADER_LIST]
    )
