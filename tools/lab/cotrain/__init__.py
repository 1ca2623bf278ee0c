"""Training beside decode over request traces: every planner of the hook on simulated engines, and the papers' claims.

machines.py and steptables.py cards and models; engine.py steps one engine; cells.py runs one planner; flexllm.py,
harli.py, llmstation.py and llmstation_rest.py ask what those papers say; shared.py puts all planners under one target;
page.py and *_page.py write docs/results/cotrain.
"""
