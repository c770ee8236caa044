"""The standard suite: which attacks an audit tries, fixed by a version name so that its verdicts can be compared.

Closed forms first, then `swift`, then the counters of the defense at hand; the published matching attacks from the budget
`standard` on. Attacks are batched over victims, so every attack sees all of them.
"""

from __future__ import annotations

from gradveil.attacks.base import Budget
from gradveil.attacks.registry import registry
from gradveil.defenses.base import Defense

VERSION = "standard-v1"

CLOSED = ("linear", "rgap")
MATCHING = {
    "quick": ("swift",),
    "standard": ("swift", "ig", "idlg", "gradinversion", "bayes"),
    "thorough": (
        *("swift", "ig", "dlg", "idlg", "cpl", "gradinversion", "bayes"),
        *("adam-cosine", "adam-l1", "adam-l2", "sgd-cosine", "lbfgs-cosine", "lbfgs-l2"),
    ),
}


def suite_attacks(defense: Defense, budget: Budget = "quick") -> list[str]:
    """The suite for one defense: what everyone tries, and what its counters know."""
    counters = [name for name in defense.counters if name in registry]
    return list(dict.fromkeys([*CLOSED, *MATCHING[budget], *counters]))
