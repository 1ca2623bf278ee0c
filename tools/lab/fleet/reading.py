"""What the figures say, in words: written by hand after they were there."""

READING = ""
