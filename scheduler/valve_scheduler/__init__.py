"""The cluster half of Valve: where offline pods go, and whether they get what they were promised."""
