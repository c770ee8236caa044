"""Victims that the attacked model was not trained on, and how it was trained."""

from __future__ import annotations

import pytest
import torch

from gradveil.auditing.case import Case
from gradveil.auditing.spec import make_spec
from gradveil.core.errors import UserError

SPEC = {"data": "mnist-5k:private=60", "model": "lenet", "victims": 4, "batch_size": 2, "trained_epochs": 1}


def test_held_out_victims_take_no_part_in_the_training() -> None:
    plain, apart = Case(make_spec(SPEC)), Case(make_spec({**SPEC, "held_out": True}))
    assert len(plain.training_data.private) == 60 and len(apart.training_data.private) == 52
    victims = {tuple(x.flatten().tolist()) for v in range(4) for x in apart.batch(v).x}
    assert not victims & {tuple(x.flatten().tolist()) for x in apart.training_data.private.x}
    assert torch.equal(plain.victims, apart.victims) and plain.id != apart.id


def test_another_training_is_another_case_and_a_wrong_one_is_refused() -> None:
    plain, same = Case(make_spec(SPEC)), Case(make_spec({**SPEC, "trained_by": "sgd"}))
    other = Case(make_spec({**SPEC, "trained_by": "adam:lr=0.001"}))
    assert plain.id == same.id != other.id
    with pytest.raises(UserError, match="lion"):
        make_spec({**SPEC, "trained_by": "lion"})
