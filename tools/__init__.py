"""Valve's tools: the emulated GPU, simulators, benchmarks, demo. They may import the product; never the reverse."""
