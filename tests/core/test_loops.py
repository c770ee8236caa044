"""Long loops that are cut short: what the other steps would have taken."""

from __future__ import annotations

import time

import pytest

from gradveil.core.loops import FEW, Loop, is_sampled, sampled


def work(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_loop_runs_to_its_end_and_is_cut_short_only_where_it_is_sampled() -> None:
    assert list(Loop(100)) == list(range(100)) and not is_sampled()
    with sampled():
        assert list(Loop(100)) == list(range(FEW)) and is_sampled()
        assert list(Loop(2)) == [0, 1]
        assert list(Loop(0)) == []
    assert len(list(Loop(100))) == 100


def test_the_time_of_the_steps_that_are_left_out_is_extrapolated_without_the_first() -> None:
    with sampled() as sample:
        for step in Loop(1000):
            work(0.04 if step == 0 else 0.01)
    assert sample.skipped == pytest.approx(0.01 * (1000 - FEW), rel=0.3)


def test_one_slow_step_and_a_slow_start_do_not_change_what_is_expected() -> None:
    with sampled() as sample:
        for step in Loop(1000):
            work({0: 0.3, 3: 0.05}.get(step, 0.005))
    assert sample.skipped == pytest.approx(0.005 * 998, rel=0.4)


def test_loops_within_loops_are_multiplied() -> None:
    with sampled() as sample:
        for _ in Loop(10):
            for _ in Loop(100):
                work(0.001)
    assert sample.clock() - time.process_time() == pytest.approx(10 * 100 * 0.001, rel=0.3)


def test_units_count_where_steps_differ_and_shared_loops_are_known() -> None:
    done = [0.0]
    with sampled() as sample:
        for _ in Loop(100, done=lambda: sum(done)):  # two units per step, so half as many steps are expected
            work(0.01)
            done.append(2)
        assert sample.skipped == pytest.approx(0.01 / 2 * (100 - 2 * FEW), rel=0.3) and sample.shared == 0
        before = sample.clock()
        for _ in Loop(50, shared=True):
            work(0.005)
        assert sample.shared == pytest.approx(sample.clock() - before, rel=0.05)
        assert sample.shared == pytest.approx(50 * 0.005, rel=0.3)


def test_a_loop_that_ends_by_itself_takes_no_more_than_it_took() -> None:
    with sampled() as sample:
        for step in (loop := Loop(1000)):
            if step == 1:
                loop.stop()
    assert step == 1 and sample.skipped == 0
    for step in (loop := Loop(1000)):
        if step == 7:
            loop.stop()
    assert step == 7
