"""Processes that mean ill, for benches of valved beside them."""
