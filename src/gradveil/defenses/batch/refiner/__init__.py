"""Refiner: noise-like images whose gradient is useful for the training."""
