"""Refiner: noise-like images whose gradient serves the training."""
