"""Defenses that change the gradient of a batch, with model and batch at hand."""
