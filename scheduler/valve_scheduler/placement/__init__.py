"""Chooses nodes and GPUs for offline jobs, over the whole cluster in arrays."""
