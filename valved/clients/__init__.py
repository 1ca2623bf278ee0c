"""Serves the link socket: connections, identity, registration, channels."""
