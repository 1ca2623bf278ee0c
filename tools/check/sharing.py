"""Python writes no word of shared memory by pack_into: that fills its place with zeros first, and another process may
read them. A packed value that is assigned as a slice, or through a cast view, is written as it is.
"""

from __future__ import annotations

import ast

from valve_tools.check.tree import ROOT, tracked


def findings() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: pack_into writes zeros first; assign what pack() gives to the slice"
        for path in tracked(".py")
        for line in judge(path.read_text())
    ]


def judge(text: str) -> list[int]:
    """The lines of a Python file that do so. A buffer of one process is not told from a page of two: none may."""
    names = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))
    return sorted({name.lineno for name in names if name.attr == "pack_into"})
