"""Measurements of `valve tune`: programs for an environment that has the wheel of tune/, run by their paths."""
