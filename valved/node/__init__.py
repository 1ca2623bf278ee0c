"""Answers for the whole node: status, API calls, brake, hand-over, upkeep."""
