"""Ids, states, events and decisions: frozen values. Imports the standard library only."""
