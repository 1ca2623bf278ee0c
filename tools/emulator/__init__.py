"""The emulated GPU: a server with the driver's state, a preload for its nodes, a stand-in CUDA."""
