"""valved: the daemon of one node. It gates and wakes offline GPU channels around online work."""
