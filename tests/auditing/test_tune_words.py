"""What a tune says where it recommends nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gradveil.auditing.tuning.choice import Wanted, line_up_note, none_text
from gradveil.core.results import Rate


@pytest.mark.parametrize(
    ("standings", "says"),
    [
        (["leaks", "leaks"], "Every setting that was tried leaks."),
        (["leaks", "unknown", "leaks"], "2 of 3 leak, and of the others it cannot be told"),
        (["unknown"], "Of no setting can it be told"),
    ],
)
def test_no_more_is_said_to_leak_than_does(standings: list[str], says: str) -> None:
    settings = [SimpleNamespace(standing=standing) for standing in standings]
    assert says in none_text(settings, Wanted(5.0, None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "low", "basis", "says"),
    [
        (0.875, 0.47, "picture", "88% of the victims came first of 300 candidates (guessing: 0.3%)"),
        (0.0, 0.0, "picture", None),
        (0.875, 0.47, "certificate", None),  # then the text rests on the proof, and names its limit
    ],
)
def test_a_recommendation_tells_that_a_line_up_still_succeeds(rate: float, low: float, basis: str, says: str | None) -> None:
    line_up = Rate(rate=rate, low=low, high=1.0, chance=1 / 300)
    fresh = SimpleNamespace(line_up=None, basis=basis, candidates=None)
    setting = SimpleNamespace(spec="dpsgd:noise=0.057", line_up=line_up, candidates=300, basis=basis, fresh=fresh)
    note = line_up_note(setting)  # type: ignore[arg-type]
    assert (note is None) == (says is None) and (says is None or (note and says in note))
