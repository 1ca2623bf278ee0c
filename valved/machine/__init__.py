"""Does what touches the machine, behind the protocols of ports.py: clock, processes, cards, signals, files."""
