"""Requests and training micro-batches before several modelled replicas: the router's own planner against others."""
