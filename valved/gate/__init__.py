"""Stops offline channels and lets them run again: services, requests, the ladder, and the native gate."""
