"""Results of the ATS search: the scores of one candidate, the outcome of a search, and the file that keeps scores."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.core.errors import UserError
from gradveil.defenses.data.ats.defense import Policy, parse_policies, write_policy
from gradveil.processes.scheduler import Listener
from gradveil.storage.reading import parse_json, read_bytes

Json = dict[str, Any]
MAX_LOG = 1 << 26  # bytes


@dataclass(frozen=True)
class Candidate:
    """A policy as a job for workers."""

    policy: Policy
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return write_policy((self.policy,))


@dataclass(frozen=True)
class Score:
    """The two scores of a candidate. One that costs too much accuracy has no privacy score (Algorithm 1, line 4)."""

    policy: Policy
    accuracy: float
    privacy: float | None
    failed: str | None = None  # the reason where it could not be scored

    def plain(self) -> Json:
        named = {"policy": write_policy((self.policy,))}
        if self.failed:
            return {**named, "failed": self.failed}
        return {**named, "accuracy": self.accuracy, "privacy": self.privacy}

    @staticmethod
    def read(row: Json) -> Score:
        (policy,) = parse_policies(row["policy"])
        if "failed" in row:
            return Score.lost(policy, str(row["failed"]))
        return Score(policy, float(row["accuracy"]), None if row["privacy"] is None else float(row["privacy"]))

    @staticmethod
    def lost(policy: Policy, reason: str) -> Score:
        return Score(policy, math.nan, None, reason)


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search."""

    policies: tuple[Policy, ...]  # the best, no two of which share a function
    ranking: tuple[Score, ...]  # the candidates that keep the accuracy, best first
    rejected: int  # number of candidates that do not
    untransformed: float  # the privacy score without any policy
    failed: tuple[Score, ...] = ()  # candidates that could not be scored in two tries

    @property
    def policy(self) -> str:
        return write_policy(self.policies)

    @property
    def best(self) -> float:
        return self.ranking[0].privacy or 0.0

    @property
    def median(self) -> float:
        return statistics.median(s.privacy or 0.0 for s in self.ranking)

    def plain(self) -> Json:
        return {
            "schema": 1,
            "policy": self.policy,
            "privacy": {"best": self.best, "median": self.median, "untransformed": self.untransformed},
            "candidates": {"scored": len(self.ranking), "rejected": self.rejected, "failed": len(self.failed)},
            "best": [score.plain() for score in self.ranking[:10]],
        }


def _line(row: Json) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _stored(line: bytes, path: Path) -> Score:
    row = parse_json(line, path)
    try:
        return Score.read(row if isinstance(row, dict) else {})
    except (UserError, KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{path}: a line is not a score; give another --out, or remove it.") from None


class ScoreLog(Listener[Candidate, Json]):
    """Scores as JSON lines, each written to disk at once. An incomplete line of a killed process is removed.

    Candidates that failed in an earlier run are tried again. `note` is called after every score.
    """

    def __init__(self, path: Path | None, key: str, note: Callable[[], None]):
        self.path, self.scores, self.note = path, dict[Policy, Score](), note
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = read_bytes(path, MAX_LOG).splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if lines and not _line({"search": key}).startswith(lines[0]):
            raise UserError(f"{path} does not hold the scores of this search; give another --out, or move it away.")
        if len(whole) < len(lines):
            os.truncate(path, sum(map(len, whole)))
        if not whole:
            self._append({"search": key})
        for line in whole[1:]:
            score = _stored(line, path)
            if not score.failed:
                self.scores[score.policy] = score

    def finished(self, job: Candidate, result: Json) -> None:
        self.scores[job.policy] = Score.read(result)
        if self.path:
            self._append(result)
        self.note()

    def given_up(self, job: Candidate, reason: str) -> None:
        self.finished(job, Score.lost(job.policy, f"it failed twice ({reason})").plain())

    def _append(self, row: Json) -> None:
        assert self.path is not None
        with self.path.open("ab") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())
