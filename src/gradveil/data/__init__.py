"""Data sets: a name, an archive, folders of pictures or tensors become private, public and test images in [0, 1]."""

from gradveil.data.dataset import DataSet
from gradveil.data.load import load, names

__all__ = ["DataSet", "load", "names"]
