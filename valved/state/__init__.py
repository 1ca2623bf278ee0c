"""Keeps what the daemon knows: who is here, what happened, figures, and the file for a successor."""
