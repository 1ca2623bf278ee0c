"""Sends requests and training micro-batches to the replicas of one model."""
