"""Tiles on a card beside an engine in the same process: shares of its processors, and at most two tiles in flight.

Never run on a card: `valve gpu-lab` asks a lent one (C16), and the emulated GPU rehearses it.
"""
