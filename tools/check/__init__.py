"""Checks of the tree itself: sizes, include and import rules, formatting."""
