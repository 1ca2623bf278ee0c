"""What a training step is cut into, in which orders it may run and what it must keep. Pure: no torch, no clock."""
