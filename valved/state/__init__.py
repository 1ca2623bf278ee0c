"""Keeps what the daemon knows: services and clients, what happened, figures, and the file for a successor."""
