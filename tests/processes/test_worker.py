"""Real worker processes: what they are told, how they end, and who gets the second try."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from gradveil.core.errors import UserError
from gradveil.processes.scheduler import Listener, OutOfMemory, run_jobs
from gradveil.processes.worker import ProcessWorkers

needs_signals = pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")


@dataclass(frozen=True)
class Step:
    key: str
    needs: tuple[str, ...] = ()


def prepare(setup):
    """Runs in a worker process, where this file is imported by its name. Answers with its own number."""
    if "refuse" in setup:
        raise UserError(setup["refuse"])

    def perform(key, second_try, progress):
        print("a user's model prints what it likes")
        if key in setup.get("kill", []):
            os.kill(os.getpid(), signal.SIGKILL)
        if key in setup.get("hungry", []) and not second_try:
            raise OutOfMemory("8 GB\nwanted")
        if key in setup.get("full", []):
            raise UserError("the disk is full")
        progress(1, 2)
        time.sleep(setup.get("slow", {}).get(key, 0))
        return [key, second_try, os.getpid()]

    return perform


class Recorder(Listener):
    def __init__(self):
        self.results, self.reasons, self.retries, self.steps, self.late = {}, {}, {}, [], []

    def progressed(self, job, done, total):
        self.steps.append((job.key, done, total))

    def finished(self, job, result):
        self.results[job.key] = result

    def retried(self, job, reason):
        self.retries[job.key] = reason

    def given_up(self, job, reason):
        self.reasons[job.key] = reason

    def left_out(self, job):
        self.late.append(job.key)


def run(setup, keys, limit, monkeypatch, recorder=None, deadline=None) -> Recorder:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    monkeypatch.setattr(prepare, "__module__", Path(__file__).stem)
    recorder = recorder or Recorder()
    run_jobs(
        [Step(key) if key != "z" else Step(key, ("a", "b")) for key in keys],
        ProcessWorkers(prepare, setup, lambda job: job.key, limit),
        recorder,
        deadline,
    )
    return recorder


@needs_signals
def test_a_lost_job_is_tried_again_in_a_fresh_process_and_the_others_are_kept(monkeypatch):
    recorder = run({"kill": ["b"], "hungry": ["c"]}, "abcd", 1, monkeypatch)
    assert recorder.reasons == {"b": "signal SIGKILL; out of memory?"} == {"b": recorder.retries["b"]}
    assert recorder.retries["c"] == "out of memory: 8 GB wanted"
    assert {key: result[:2] for key, result in recorder.results.items()} == {
        "a": ["a", False],
        "c": ["c", True],
        "d": ["d", False],
    }
    assert recorder.results["c"][2] == recorder.results["d"][2] != recorder.results["a"][2]
    assert ("a", 1, 2) in recorder.steps


@needs_signals
def test_a_process_that_dies_while_it_has_nothing_to_do_costs_no_job_a_try(monkeypatch):
    class KillsAfterA(Recorder):
        def finished(self, job, result):
            super().finished(job, result)
            if job.key == "a":
                os.kill(result[2], signal.SIGKILL)

    recorder = run({"slow": {"b": 2}}, "abz", 2, monkeypatch, KillsAfterA())
    assert recorder.results.keys() == {"a", "b", "z"} and not recorder.retries and not recorder.reasons
    assert recorder.results["z"][2] != recorder.results["a"][2]


def test_what_the_user_must_mend_ends_the_run_in_one_line(monkeypatch):
    with pytest.raises(UserError, match="^the disk is full$"):
        run({"full": ["b"]}, "abc", 1, monkeypatch)
    with pytest.raises(UserError, match=r"^a worker process could not start \(no such data\); what is finished is kept"):
        run({"refuse": "no such data"}, "abc", 2, monkeypatch)


def test_no_process_outlives_the_run(monkeypatch):
    recorder = run({}, "abcd", 2, monkeypatch)
    pids = {result[2] for result in recorder.results.values()}
    assert 1 <= len(pids) <= 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_are_stopped_at_the_deadline(monkeypatch) -> None:
    begun = time.monotonic()
    recorder = run({"slow": {"b": 60}}, ["a", "b", "c"], 1, monkeypatch, deadline=begun + 10)
    assert time.monotonic() - begun < 30
    assert list(recorder.results) == ["a"] and recorder.late == ["b", "c"] and not recorder.reasons
