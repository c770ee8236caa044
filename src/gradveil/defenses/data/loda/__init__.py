"""LODA: obscured images that keep their features."""
