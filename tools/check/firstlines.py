"""Every file begins with a line that says what it does: a docstring in Python, a comment in C."""

from __future__ import annotations

import ast
import re

from valve_tools.check.tree import ROOT, tracked

LEAST_WORDS = 4
EMPTY = re.compile(r"(this (module|file)|helpers?|utils|utilities|misc|various|miscellaneous|stuff)( |\.$)")


def findings() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in tracked(".py", ".c", ".h")
        if (problem := judge(path.name, path.read_text()))
    ]


def judge(name: str, text: str) -> str:
    """What is wrong with the beginning of a file; empty: nothing."""
    if not text.strip():
        return ""
    first = _of_python(text) if name.endswith(".py") else _of_c(text)
    if not first:
        return "no first line says what it does"
    words = first.lower().split()
    if EMPTY.match(first.lower()):
        return f"its first line begins with words that say nothing: {first}"
    if len(words) < LEAST_WORDS and name != "__init__.py":
        return f"its first line is too short to say what it does: {first}"
    return ""


def _of_python(text: str) -> str:
    words = ast.get_docstring(ast.parse(text)) or ""
    return words.split("\n\n")[0].replace("\n", " ")


def _of_c(text: str) -> str:
    """The first comment, less a license tag."""
    lines = [line for line in text.lstrip().splitlines() if "SPDX" not in line]
    if not lines or not lines[0].startswith(("/*", "//")):
        return ""
    comment = []
    for line in lines:
        comment.append(line.strip().removeprefix("/*").removeprefix("//").removesuffix("*/").strip(" *"))
        if "*/" in line or (not line.strip(" */") and any(comment)):
            break
    return " ".join(filter(None, comment))
