"""A week of observing as one page: what harvesting would save, what it would cost whom, and where to begin."""
