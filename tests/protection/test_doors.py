"""Defenses that misbehave at each door. With the Flower engine too: benchmarks/faults/doors.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[2] / "benchmarks" / "faults"
if not FAULTS.is_dir():  # not part of the source distribution
    pytest.skip("the campaign is not here", allow_module_level=True)
sys.path.insert(0, str(FAULTS))

import doors  # noqa: E402
import misbehaving  # noqa: E402


@pytest.mark.parametrize("door", doors.DOORS)
@pytest.mark.parametrize("fault", misbehaving.FAULTS)
def test_an_answer_of_the_defense_leaves_or_nothing(fault: str, door: str) -> None:
    if door in ("mod", "guard"):
        pytest.importorskip("flwr", reason="these doors are Flower's")
    answers = fault.startswith("answers") and not (door == "mod" and "weights" in fault)  # a mod has no weights to show
    assert doors.DOORS[door](fault) == (doors.PROTECTED if answers else doors.NOTHING)


def test_the_tournament_notices_what_must_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The raw update under the name of a fault, and a text that quotes it."""
    monkeypatch.setitem(misbehaving.FAULTS, "returns {}", lambda tensors, step: tensors)
    assert {act("returns {}") for name, act in doors.DOORS.items() if name in ("shield", "inline engine")} == {doors.LEAK}
    monkeypatch.setitem(misbehaving.FAULTS, "answers in place", lambda tensors, step: tensors)
    assert doors.at_shield("answers in place") == doors.LEAK
    before = dict(doors.network().state_dict())
    assert doors.judged("returns {}", before, None, "ValueError: the first values are 0.5") == doors.LEAK
    assert doors.judged("returns {}", before, None, "refused") == doors.NOTHING
