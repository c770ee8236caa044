"""What the attacks read off a network's layers."""

import pytest
from torch import nn

from gradveil.attacks.layers import is_smooth


@pytest.mark.parametrize(
    ("module", "smooth"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), True),
        (nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.ReLU()), False),
        (nn.TransformerEncoderLayer(8, 2, 16, activation="gelu"), True),  # which keeps its activation as a function
        (nn.TransformerEncoderLayer(8, 2, 16, activation="relu"), False),
        (nn.TransformerDecoderLayer(8, 2, 16, activation="gelu"), True),
        (nn.Linear(4, 4), False),  # shows nothing: its activations may be anywhere
    ],
)
def test_smooth_are_networks_that_show_smooth_activations_only(module: nn.Module, smooth: bool) -> None:
    assert is_smooth(module) is smooth
