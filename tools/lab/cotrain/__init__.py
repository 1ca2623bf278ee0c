"""Training beside decode over request traces: every planner of the hook on simulated engines, and the papers' claims.

machines.py cards and models; engine.py steps one engine; cells.py runs one planner; harli.py and llmstation.py ask what
those papers say; shared.py puts all planners under one target; page.py writes docs/results/cotrain.
"""
