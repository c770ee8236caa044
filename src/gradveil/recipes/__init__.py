"""The papers' tables as recipes over audits: `gradveil reproduce NAME`."""

from gradveil.recipes.recipe import Recipe, Scale, load, names

__all__ = ["Recipe", "Scale", "load", "names"]
