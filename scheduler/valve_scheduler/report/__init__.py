"""A week of observing as one page: what harvesting would save, what it would cost each service, and where to begin."""
