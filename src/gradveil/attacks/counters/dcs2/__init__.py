"""Counters of DCS²."""
