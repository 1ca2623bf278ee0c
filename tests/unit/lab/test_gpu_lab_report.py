"""The results page says what was measured on a card, and nothing else."""

import re
from pathlib import Path
from xml.etree import ElementTree

from valve_tools.gpu import catalog, report
from valve_tools.gpu.outcome import Figure, LabRow, LabVerdict

ROOT = Path(__file__).resolve().parents[3]


def row(name="D4", *, dry_run=False, date="2031-01-02", **more):
    figure = Figure(samples=(1.0, 3.0, 2.0)).record()
    values = {
        "experiment": name,
        "batch": "contact",
        "verdict": LabVerdict.OK,
        "detail": "path a: 200 pauses | all frozen",
        "dry_run": dry_run,
        "date": date,
        "seconds": 1.0,
        "commit": "abc1234",
        "gpu": "Some GPU",
        "driver": "580.1",
        "figures": {"off_us": figure},
        **more,
    }
    return LabRow(**values)


def keep(folder, name, *rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(each.as_json() + "\n" for each in rows))


def test_the_committed_page_is_what_the_committed_results_say():
    results = ROOT / "docs" / "results"

    assert report.page(report.measured([results / "hardware"])) == (results / "hardware.md").read_text()


def test_without_results_every_row_says_not_yet_run():
    page = report.page([])

    assert page.count(f"| {report.NOT_YET} |") == len(catalog.experiments())


def test_a_measurement_shows_with_date_commit_and_driver(tmp_path):
    keep(tmp_path, "contact.jsonl", row())

    page = report.page(report.measured([tmp_path]))

    line = next(line for line in page.splitlines() if line.startswith("| D4 |"))
    assert "**OK**" in line
    assert "2031-01-02 | abc1234 | Some GPU, 580.1 |" in line
    assert "pauses \\| all frozen" in line
    assert "| D4 off_us | 3 | 1.0 | 2.0 | 3.0 | 3.0 | 3.0 | 3.0 |" in page


def test_a_rehearsal_is_left_out_even_under_a_measurements_name(tmp_path):
    keep(tmp_path, "contact.jsonl", row(dry_run=True))
    keep(tmp_path, "contact.dry.jsonl", row(dry_run=True))

    assert report.measured([tmp_path]) == []


def test_the_newest_answer_counts_and_a_torn_line_is_no_row(tmp_path):
    keep(tmp_path / "a", "contact.jsonl", row(date="2031-05-01", detail="newer"))
    keep(tmp_path / "b", "contact.jsonl", row(date="2030-05-01", detail="older"))
    with (tmp_path / "a" / "contact.jsonl").open("a") as file:
        file.write('{"experiment": "D1", "ba')

    page = report.page(report.measured([tmp_path]))

    assert "newer" in page
    assert "older" not in page


def test_the_page_is_written_by_the_command(tmp_path, capsys):
    from valve_tools.gpu.command import main

    target = tmp_path / "hardware.md"
    assert main(["report", str(tmp_path), "--to", str(target)]) == 0

    assert target.read_text() == report.page([])
    assert "0 of" in capsys.readouterr().out


def test_distributions_are_drawn_and_the_page_shows_them(tmp_path):
    results = tmp_path / "results"
    figure = Figure(samples=tuple(float(i) for i in range(-2, 300))).record()
    keep(
        results / "hardware",
        "contact.jsonl",
        row(figures={"off_us": figure, "few_us": Figure(samples=(1.0,)).record()}),
    )

    report.write([results / "hardware"], results / "hardware.md")

    assert "![D4](hardware/D4.svg)" in (results / "hardware.md").read_text()
    drawing = ElementTree.parse(results / "hardware" / "D4.svg")
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert "off_us" in texts
    assert "few_us" not in texts
    assert {"1", "10", "100", "1000"} <= set(texts)


def test_the_manual_names_every_experiment_and_calls_that_end_in_time():
    text = (ROOT / "docs" / "hardware.md").read_text()
    calls = re.findall(r"\| `--batch ([a-z,]+)` \|", text)
    seconds = {batch.name: batch.seconds for batch in catalog.BATCHES}

    assert sorted(name for call in calls for name in call.split(",")) == sorted(seconds)
    assert all(sum(seconds[name] for name in call.split(",")) <= catalog.BATCH_LIMIT_S for call in calls)
    ranges = text.replace("D0-D4b", "D0 D1 D2 D3 D4 D4u D4b").replace("R1-R6", "R1 R2 R3 R4 R5 R6")
    assert set(catalog.experiments()) <= set(re.findall(r"\b[CDPR]\d+[bu]?\b", ranges))
