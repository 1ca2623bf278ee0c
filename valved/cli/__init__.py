"""The `valve` command."""
