"""Version 1 of the node API."""
