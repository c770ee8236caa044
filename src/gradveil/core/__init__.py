"""The vocabulary and the numerics that everything else is built on."""
