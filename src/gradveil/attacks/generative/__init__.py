"""Attacks with a learned prior."""
