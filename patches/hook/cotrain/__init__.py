"""Who trains beside decode, how much of it and in which way: planners, one a file, and what a plan will take.

Standard library and numpy only; no clock, no chance, no system: times arrive as arguments, in milliseconds. The lab and
an engine call the same code.
"""
