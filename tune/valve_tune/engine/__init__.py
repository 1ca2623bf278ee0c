"""The trainer inside an engine's process."""
