"""Gradveil in a Flower app that exists already: protect what leaves, check what comes in, keep what the server sees.

`mod` protects the outgoing update and leaves the training code alone; `protect` is for the training function itself and
takes every defense; `capture` goes around the server's strategy. `arrays` holds the same on plain NumPy, for other
engines, and needs no Flower.
"""

from gradveil.protection.flower.arrays import STATISTICS, check_arrays, protect_arrays, save_arrays
from gradveil.protection.flower.capture import capture
from gradveil.protection.flower.guard import Guard, network, protect, receive
from gradveil.protection.flower.mod import mod

__all__ = [
    "STATISTICS",
    "Guard",
    "capture",
    "check_arrays",
    "mod",
    "network",
    "protect",
    "protect_arrays",
    "receive",
    "save_arrays",
]
