"""The rule for jobs and workers, with workers that only pretend: order, second tries, giving up, progress."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.core.errors import UserError
from gradveil.processes.scheduler import Listener, Lost, OutOfMemory, ThisProcess, Workers, run_jobs


@dataclass(frozen=True)
class Step:
    key: str
    needs: tuple[str, ...] = ()


class FakeWorkers(Workers[Step, str]):
    """`losses` says how often the worker of a job is lost. Which job ends first is drawn from `seed`."""

    def __init__(self, limit: int, losses: dict[str, int] | None = None, seed: int = 0, last: int | None = None):
        self.limit, self.losses, self.last = limit, Counter(losses or {}), last
        self.random, self.running, self.tries, self.stopped = random.Random(seed), [], [], 0

    def free(self) -> bool:
        return len(self.running) < self.limit

    def start(self, job: Step, second_try: bool) -> None:
        assert self.free() and not self.stopped
        self.running.append(job)
        self.tries.append((job.key, second_try))

    def wait(self, progress):
        if len(self.tries) - len(self.running) == self.last:
            raise UserError("no node is left")
        job = self.running.pop(self.random.randrange(len(self.running)))
        progress(job, 1, 2)
        if self.losses[job.key]:
            self.losses[job.key] -= 1
            return job, Lost(f"{job.key} killed it")
        return job, job.key.upper()

    def stop(self) -> None:
        self.stopped += 1


class Recorder(Listener):
    def __init__(self):
        self.events = []

    def started(self, job):
        self.events.append(("started", job.key))

    def progressed(self, job, done, total):
        self.events.append(("progressed", job.key, done, total))

    def finished(self, job, result):
        self.events.append(("finished", job.key, result))

    def retried(self, job, reason):
        self.events.append(("retried", job.key, reason))

    def given_up(self, job, reason):
        self.events.append(("given up", job.key, reason))

    def keys(self, event: str) -> list[str]:
        return [e[1] for e in self.events if e[0] == event]


def run(jobs, workers) -> Recorder:
    recorder = Recorder()
    run_jobs(jobs, workers, recorder)
    return recorder


DIAMOND = [Step("a"), Step("b", ("a",)), Step("c", ("a",)), Step("d", ("b", "c", "stored"))]


def test_one_worker_does_the_jobs_in_their_order_and_every_event_is_told():
    workers = FakeWorkers(1)
    recorder = run(DIAMOND, workers)
    expected = [(("started", k), ("progressed", k, 1, 2), ("finished", k, k.upper())) for k in "abcd"]
    assert recorder.events == [event for events in expected for event in events]
    assert workers.stopped == 1


def test_jobs_that_are_ready_run_at_the_same_time_up_to_the_limit():
    jobs = [Step(str(i)) for i in range(5)]
    started = [("started", str(i)) for i in range(5)]
    few, many = (run(jobs, FakeWorkers(limit)).events for limit in (3, 100))
    assert few[:3] == started[:3] and few[3][0] == "progressed"
    assert many[:5] == started


def test_a_lost_job_is_tried_once_more_before_all_others():
    workers = FakeWorkers(1, {"b": 1})
    recorder = run(DIAMOND, workers)
    assert ("retried", "b", "b killed it") in recorder.events and not recorder.keys("given up")
    assert workers.tries == [("a", False), ("b", False), ("b", True), ("c", False), ("d", False)]
    assert recorder.keys("finished") == ["a", "b", "c", "d"]


def test_a_job_that_is_lost_twice_is_given_up_with_the_reason_and_the_others_go_on():
    workers = FakeWorkers(1, {"b": 5})
    recorder = run(DIAMOND, workers)
    assert recorder.events.count(("given up", "b", "b killed it")) == 1
    assert recorder.keys("finished") == ["a", "c", "d"], "what needs it sees what is stored for it"
    assert workers.tries.count(("b", True)) == 1 and workers.stopped == 1


def test_when_no_worker_can_go_on_the_run_ends_and_the_workers_are_stopped():
    workers, recorder = FakeWorkers(2, last=2), Recorder()
    with pytest.raises(UserError, match="no node is left"):
        run_jobs(DIAMOND, workers, recorder)
    assert len(recorder.keys("finished")) == 2
    assert workers.stopped == 1


def test_jobs_that_need_each_other_are_refused_instead_of_waited_for():
    with pytest.raises(ValueError, match="need each other: a, b"):
        run([Step("a", ("b",)), Step("b", ("a",)), Step("c")], FakeWorkers(2))


# -- this process ------------------------------------------------------------------------------------------------------


def test_in_this_process_a_job_that_runs_out_of_memory_gets_a_second_try():
    tries = []

    def perform(job, second_try, progress):
        tries.append((job.key, second_try))
        progress(3, 4)
        if job.key == "never" or (job.key == "half" and not second_try):
            raise OutOfMemory("8 GB\nwanted")
        return len(tries)

    recorder = run([Step("half"), Step("never"), Step("fine")], ThisProcess(perform))
    assert tries == [("half", False), ("half", True), ("never", False), ("never", True), ("fine", False)]
    assert ("given up", "never", "OutOfMemory: 8 GB wanted") in recorder.events
    assert [e for e in recorder.events if e[0] == "finished"] == [("finished", "half", 2), ("finished", "fine", 5)]
    assert recorder.events.count(("progressed", "half", 3, 4)) == 2


@pytest.mark.parametrize(("lost", "raised"), [(OutOfMemory, RuntimeError), (Exception, UserError)])
def test_in_this_process_other_errors_end_the_run(lost, raised):
    def perform(job, second_try, progress):
        raise raised("stop")

    with pytest.raises(raised, match="stop"):
        run([Step("a")], ThisProcess(perform, lost=lost))


# -- random graphs -----------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw):
    size = draw(st.integers(1, 12))
    steps = []
    for i in range(size):
        needs = draw(st.sets(st.integers(0, max(0, i - 1)), max_size=3)) if i else set()
        steps.append(Step(str(i), tuple(map(str, sorted(needs)))))
    return draw(st.permutations(steps))


@given(
    jobs=graphs(),
    limit=st.integers(1, 4),
    losses=st.dictionaries(st.integers(0, 11).map(str), st.integers(1, 3)),
    seed=st.integers(0, 2**32),
)
def test_any_graph_ends_with_every_job_after_its_needs_and_no_job_tried_more_than_twice(jobs, limit, losses, seed):
    workers = FakeWorkers(limit, losses, seed)
    recorder = run(jobs, workers)
    places = {}
    for place, (event, key, *_) in enumerate(recorder.events):
        places.setdefault((event, key), []).append(place)
    for job in jobs:
        lost = losses.get(job.key, 0)
        assert len(places["started", job.key]) == min(2, 1 + lost)
        assert len(places.get(("retried", job.key), [])) == min(1, lost)
        assert (("given up", job.key) in places) == (lost >= 2) != (("finished", job.key) in places)
        for need in job.needs:
            end = places.get(("finished", need)) or places["given up", need]
            assert end[0] < places["started", job.key][0]
    assert workers.stopped == 1 and not workers.running
