"""The manual builds offline, with no broken link, and a reader fetches nothing from elsewhere."""

import re
import subprocess
import sys

import pytest
import yaml


@pytest.fixture(scope="module")
def site(repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("manual")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "-q",
        "--strict",
        "-f",
        "tools/build/manual.yml",
        "-d",
        str(folder),
    ]
    done = subprocess.run(build, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_of_the_manual_is_out_of_reach(site, repository):
    nav = yaml.safe_load((repository / "tools/build/manual.yml").read_text())["nav"]
    listed = {page for part in nav for pages in part.values() for page in flat(pages)}
    pages = {path.name for path in (repository / "docs").glob("*.md")}

    assert pages <= listed
    assert all((site / page.replace("README.md", "index.html").replace(".md", ".html")).exists() for page in listed)


def flat(pages):
    return [pages] if isinstance(pages, str) else [page for entry in pages for page in entry.values()]


def test_no_page_fetches_anything_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert [url for url in fetched if "canonical" not in url] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import", sheet.read_text()), sheet


def test_a_link_that_leads_nowhere_fails_the_build(repository, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[gone](gone.md)\n")
    settings = (repository / "tools/build/manual.yml").read_text()
    settings = re.sub(r"^(docs_dir|site_dir|hooks|nav):.*?(?=^\w|\Z)", "", settings, flags=re.M | re.S)
    (tmp_path / "mkdocs.yml").write_text(settings)

    build = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert "gone.md" in done.stderr
