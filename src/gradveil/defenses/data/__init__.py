"""Defenses that change a client's images once, before any training."""
