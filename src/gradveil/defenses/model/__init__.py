"""Defenses that change the network both sides run."""
