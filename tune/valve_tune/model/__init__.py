"""Forward and backward of one tile: written out for the Llama family, autograd for every other decoder."""
