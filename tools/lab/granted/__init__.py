"""Granted time over request traces: the product's policy on a simulated engine.

engine.py steps one engine; sweep.py asks what each setting gives; page.py writes docs/results/granted.md.
"""
