"""Defenses that change each batch before its gradient is taken."""
