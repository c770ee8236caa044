"""Attacks in stages, the fast ones first: a defense that leaks by the attacks of one stage is not asked those of the next.

Every stage is one more look at the same victims, and who looks often sees a leak by chance. So before the last stage, which is
tested at the level of every verdict, only what is far beyond that level settles a defense.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from gradveil.auditing.advice import is_strong
from gradveil.auditing.spec import AuditSpec, written
from gradveil.summary import CONTROL, LEAKS, Summary

CLEAR = 0.005  # p-value up to which a leak is settled before the last stage; two such looks add 1% of false alarms at most

Asked = MutableMapping[str, tuple[str, ...]]  # the attacks that are asked of a defense; all of those that are not in it


class Stages:
    """The attacks of each stage. After each, `settle` takes out what clearly leaks; a control, if the attacks get enough.

    Without `until_leak` in the spec there is one stage, which has all attacks. `settled` is what leaked before.
    """

    def __init__(self, spec: AuditSpec, settled: Asked | None = None):
        self.settled: Asked = {} if settled is None else settled
        self._open = {written(defense) for defense in spec.defenses} - self.settled.keys()
        fast = [spec.suite.first, spec.suite.common(spec.budget)] if spec.until_leak and spec.suite else []
        self._stages: list[tuple[str, ...] | None] = [*fast, None]
        self._attacks: tuple[str, ...] | None = None

    def __iter__(self) -> Iterator[Asked]:
        for attacks in self._stages:
            self._attacks = attacks
            yield {**self.settled, **(dict.fromkeys(self._open, attacks) if attacks else {})}
            if not self._open:
                return

    def settle(self, summary: Summary) -> None:
        clear = [row for row in summary.defenses if row.verdict == LEAKS and row.test and row.test.p <= CLEAR]
        leaking = {row.spec for row in clear} & self._open
        if not is_strong(next((row for row in summary.defenses if row.control), None)):
            leaking.discard(CONTROL)
        if self._attacks:
            self.settled.update(dict.fromkeys(leaking, self._attacks))
        self._open -= leaking
