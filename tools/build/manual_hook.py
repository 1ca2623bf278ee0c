"""Brings pages that lie outside docs/ into the manual, for mkdocs: the pages of the root, and each room's README.

A link that works in a checkout works in the site: links to such pages are turned towards their place there, links to
source files into their plain names, as the site holds no sources.
"""

from __future__ import annotations

import functools
import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


@functools.cache
def outside() -> frozenset[str]:
    """Pages outside docs/, which have the same path in the checkout and in the site."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    return frozenset(path for path in listed.stdout.splitlines() if not path.startswith(("docs/", "tests/", ".")))


def on_files(files: Files, config: Any) -> Files:
    for path in sorted(outside()):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    source = here if here in outside() else f"docs/{here}"

    def turned(match: re.Match[str]) -> str:
        mark, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target or ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if (ROOT / path).is_dir() and (ROOT / path / "README.md").exists():
            path += "/README.md"
        if path.startswith("docs/"):
            place = path.removeprefix("docs/")
        elif path in outside():
            place = path
        elif (ROOT / path).exists():
            return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
        else:
            return match[0]  # mkdocs names it
        return f"{mark}[{text}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(turned, markdown)
