"""The GPU lab: experiments that only a real GPU can answer, rehearsed on the emulated one. Standard library only."""
