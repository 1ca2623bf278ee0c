"""Watches the cluster in rounds: SLAs, evictions, policies into nodes, accounts, profiles."""
