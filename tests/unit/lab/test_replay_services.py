"""One page for many services: each is judged, and none costs more because there are others."""

import json
from pathlib import Path

import pytest
from valve_tools.replay import services
from valve_tools.replay.command import main
from valve_tools.replay.question import Question
from valve_tools.replay.store import TaskStore
from valve_tools.replay.work import Workers, silent
from valve_tools.sim import combinations
from valve_tools.sim.sample import RULE
from valve_tools.sim.traces import TraceError


def service(folder: Path, name: str, every_s: float, requests: int = 60, out_tok: int = 20) -> None:
    rows = [f"{number * every_s},200,{out_tok}" for number in range(requests)]
    (folder / name).write_text("\n".join(["t_s,in_tok,out_tok", *rows]))


def test_each_service_of_a_folder_gets_its_own_verdict(tmp_path: Path) -> None:
    folder = tmp_path / "week"
    folder.mkdir()
    service(folder, "idle.csv", 5.0)
    service(folder, "busy.csv", 0.2, requests=600, out_tok=400)
    service(folder, "once.csv", 1.0, requests=1)
    (folder / "notes.txt").write_text("no service")

    code = main(["whatif", "--requests", str(folder), "--seeds", "1", "--jobs", "1", "--fresh", "--out", str(tmp_path)])

    page = (tmp_path / "whatif.md").read_text()
    (idle,), (busy,), (once,) = ([line for line in page.splitlines() if f"| {name} |" in line] for name in
                                 ("idle.csv", "busy.csv", "once.csv"))  # fmt: skip
    assert code == 0
    assert idle.endswith("| share |")
    assert "DO NOT USE VALVE HERE" in busy
    assert "no answer: 1 requests" in once
    assert "1 of 3 services" in page
    assert "notes.txt" not in page
    assert len(json.loads((tmp_path / "whatif.json").read_text())["data"]["services"]) == 3


def test_a_service_of_which_the_sample_shows_next_to_nothing_is_never_told_to_share(tmp_path: Path) -> None:
    """It would be idle for all that is judged, and a GPU saved."""
    service(tmp_path, "seldom.csv", 7200.0, requests=84)

    page = services.run(Question(requests=tmp_path), [1], silent)

    verdict = page.tables[0].rows[0][-1]
    assert verdict.startswith("DO NOT USE VALVE HERE: no answer: ")
    assert "a sample of 84 in 166.0 h, say nothing about a service" in verdict


def test_a_service_that_works_by_day_is_never_judged_by_its_first_night(tmp_path: Path) -> None:
    """Before, the first six hours of a load were all that was looked at, and this one would have saved a whole GPU."""
    night, day = range(0, 21_600, 60), range(21_600, 86_400)
    rows = [*(f"{at},200,20" for at in night), *(f"{at},6000,200" for at in day)]
    (tmp_path / "works.csv").write_text("\n".join(["t_s,in_tok,out_tok", *rows]))

    page = services.run(Question(requests=tmp_path), [1], silent)

    (answer,) = page.data["services"][0]["answers"]
    assert 0.2 < answer["idle_share"] < 0.4  # the night is a quarter of the day
    assert RULE in page.summary[0]


@pytest.mark.parametrize("count", [1, 4])
def test_a_service_never_costs_more_simulations_because_there_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    for number in range(count):
        service(tmp_path, f"{number}.csv", 65.0, requests=60 + number)
    runs = []
    monkeypatch.setattr(combinations, "_alone", {})
    simulate = combinations.run
    monkeypatch.setattr(combinations, "run", lambda *given: runs.append(1) or simulate(*given))

    services.run(Question(requests=tmp_path), [1], silent)

    assert len(runs) == 3 * count + 1  # on its own GPU, beside the weights, with Valve; the job alone once for all


def test_a_service_whose_file_has_changed_is_never_answered_from_what_is_kept(tmp_path: Path) -> None:
    folder, workers = tmp_path / "week", Workers(store=TaskStore(folder=tmp_path / "kept"))
    folder.mkdir()

    def saved(every_s: float) -> float:
        service(folder, "a.csv", every_s)
        (one,) = services.run(Question(requests=folder), [1], silent, workers).data["services"]
        return float(one["answers"][0]["idle_share"])

    idle, busier = saved(5.0), saved(1.0)

    assert busier < idle == saved(5.0)


def test_a_folder_without_a_service_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no"):
        services.run(Question(requests=tmp_path), [1], silent)
