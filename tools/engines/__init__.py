"""Real engines on the emulated GPU."""
