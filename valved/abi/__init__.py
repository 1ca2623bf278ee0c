"""Turns packets and shared files of proto/abi into values and back. No sockets, no decisions."""
