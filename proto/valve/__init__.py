"""Stubs generated from proto/valve: what valved says to the CLI, the scheduler and the controller."""
