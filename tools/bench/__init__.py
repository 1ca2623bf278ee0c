"""Benchmarks: each names its promise and its budget and prints its distribution."""
