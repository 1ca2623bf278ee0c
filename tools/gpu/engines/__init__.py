"""Engines for the product on a card: an online and an offline program each, which print what the demo's print."""
