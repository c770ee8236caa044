"""Matching: find images whose update equals the observed one. One batched engine; a published attack is its settings."""

from gradveil.attacks.matching.distances import (
    L1,
    L2,
    Cosine,
    Distance,
    GaussianLikelihood,
    LaplaceLikelihood,
    LayerCosine,
    LayerNorms,
    RelativeL2,
)
from gradveil.attacks.matching.engine import Match, Problem, Solution, solve
from gradveil.attacks.matching.optimizers import LBFGS, SGD, Adam
from gradveil.attacks.matching.priors import TV, BatchNormPrior, GroupPrior, L2Norm, LabelTerm, Prior
from gradveil.attacks.matching.starts import Start

__all__ = [
    "L1",
    "L2",
    "LBFGS",
    "SGD",
    "TV",
    "Adam",
    "BatchNormPrior",
    "Cosine",
    "Distance",
    "GaussianLikelihood",
    "GroupPrior",
    "L2Norm",
    "LabelTerm",
    "LaplaceLikelihood",
    "LayerCosine",
    "LayerNorms",
    "Match",
    "Prior",
    "Problem",
    "RelativeL2",
    "Solution",
    "Start",
    "solve",
]
