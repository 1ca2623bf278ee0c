"""The training loop over tiles: job, optimizer, checkpoints, data."""
