"""Command line of the node: one module per command. gRPC is kept from writing lines of its own between theirs."""

import os

_VARIABLE = "GRPC_VERBOSITY"  # read when gRPC is imported

if _VARIABLE not in os.environ:
    os.environ[_VARIABLE] = "NONE"
    import grpc as grpc

    del os.environ[_VARIABLE]  # the programs of `valve run` have a gRPC of their own
