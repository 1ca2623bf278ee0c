"""Cells of engines as a reclaim needs them: C, and its binding."""
