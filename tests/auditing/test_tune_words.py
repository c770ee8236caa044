"""What a tune says where it recommends nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gradveil.auditing.tuning.choice import Wanted, none_text


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
