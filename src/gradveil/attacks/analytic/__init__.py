"""Closed forms: what an update gives away exactly, without a search."""
