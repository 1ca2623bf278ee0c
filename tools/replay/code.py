"""A module's code without its words, which make no page stale: provenance.py and the pages of co-training hash it."""

from __future__ import annotations

import ast
import io
import tokenize


def code_of(text: str) -> str:
    """The same on every version of Python: lines of the file, not its syntax tree."""
    lines = [*text.splitlines(), ""]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and _is_words(node):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _is_words(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
