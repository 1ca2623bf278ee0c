"""Predicts what a task would cost on each replica and chooses one: pure functions, no clock and no I/O."""
