"""The experiments, by batch. Each module holds EXPERIMENTS; catalog.py puts them in order."""
