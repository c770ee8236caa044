"""What was fed is rebuilt whatever it looks like and whatever its labels are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradveil.attacks.base import Target
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.matching.fed_images import Fed, recover, soft_labels
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator


def fed_of(seen: list[Observation]) -> Fed:
    target = Target(seen, torch.stack([infer_labels(o) for o in seen]), generator(0, "fed"), "quick")
    with torch.no_grad():
        return recover(target)


@pytest.mark.parametrize("defense", ["mixup", "instahide"])
def test_encodings_and_their_labels_come_back(defense: str, observe_often: Callable) -> None:
    seen, truth = observe_often(defense, victims=3, seed=100)
    fed = fed_of(seen)
    error = (fed.pixels[:, 0] - torch.cat([t.fed.x for t in truth])).square().flatten(1).mean(1)
    assert (-10 * error.log10()).min() >= 40, error
    labels = soft_labels(fed)
    assert labels is not None
    assert torch.allclose(labels[:, 0], torch.cat([t.fed.y for t in truth]), atol=0.01)


def test_sightings_keep_to_their_victims(observe_often: Callable) -> None:
    seen, truth = observe_often("mixup", victims=2, updates=3, seed=100)
    fed = fed_of(seen)
    assert fed.victim.tolist() == [0, 1, 0, 1, 0, 1]
    by_victim = fed.by_victim(fed.pixels)
    assert by_victim.shape[:2] == (2, 3)
    for rows, trace in zip(by_victim, truth, strict=True):
        assert (rows[0] - trace.fed.x).abs().max() < 0.1  # the first sighting is the trace's
        assert (rows[1] - trace.fed.x).abs().max() > 0.3  # the second was mixed anew
