"""When offline work may run between an online service's steps, and how long a step takes: pure decisions.

Standard library and numpy only; no clock, no chance, no system: times arrive as arguments, in milliseconds.
"""
