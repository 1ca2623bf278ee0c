"""Pure decisions. Imports model (and numpy); time and chance arrive as arguments."""
