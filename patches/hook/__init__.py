"""The one small module that an engine touches: what it tells valved and what it heeds. Standard library and numpy only.

Without a daemon every call is a no-op. Read link.py and packets.py (who talks, and how), shared.py (the three shared
files), ledger.py and losses.py (who is hit by a loss), reconciler.py (what is done about it); an engine's folder beside
them says how.
"""

VERSION = "0.1.0"


class Refused(Exception):
    """Valve stays away from this engine; the text says why and what to do."""
