"""Every reader on spoilt input: a result or one clear line. The full campaign is benchmarks/faults/fuzz.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FAULTS = Path(__file__).parents[1] / "benchmarks" / "faults"
if not FAULTS.is_dir():  # not part of the source distribution
    pytest.skip("the campaign's inputs are not here", allow_module_level=True)
sys.path.insert(0, str(FAULTS))

import fuzz  # noqa: E402


@pytest.mark.parametrize("reader", fuzz.READERS)
@settings(max_examples=60)
@given(number=st.integers(0, 10**9))
def test_an_input_ends_in_a_result_or_in_one_line(reader, number, tmp_path_factory):
    if reader.startswith("models") and number % 6:  # these are whole audits and attacks
        return
    kind, said = fuzz.outcome(reader, 1, number, tmp_path_factory.mktemp("fuzz"))
    assert kind in ("result", "refused"), said


def test_the_campaign_notices_faults(tmp_path, monkeypatch):
    def broken(rng, folder):
        def job():
            (folder / ".half.json.x1").write_text("{")
            if rng.random() < 0.5:
                raise KeyError("oops")

        return job

    monkeypatch.setitem(fuzz.READERS, "broken", broken)
    kinds = set()
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        kinds.add(fuzz.outcome("broken", 0, number, tmp_path / str(number))[0])
    assert kinds == {"traceback", "half-written file"}
