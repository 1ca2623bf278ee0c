"""Changes or refuses pods at their creation."""
