"""gRPC servicers: message to model, one service call, model to message."""
