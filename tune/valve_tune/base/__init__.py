"""Where the frozen weights are: an own copy, shared memory, or a window over a host copy."""
