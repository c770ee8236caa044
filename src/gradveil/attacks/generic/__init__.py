"""Counters that need no insight into a defense: they only need to run it."""
