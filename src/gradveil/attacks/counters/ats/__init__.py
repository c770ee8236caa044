"""Counters of ATS."""
