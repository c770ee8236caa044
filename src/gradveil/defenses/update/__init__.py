"""Defenses that act on the tensors that leave the client, and on nothing else."""
