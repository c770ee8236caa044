"""Matching: find images whose update equals the observed one. One batched engine; a published attack is its settings."""
