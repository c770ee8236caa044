"""The standard suite: which attacks an audit tries, fixed by a version name so that its verdicts can be compared.

Closed forms first, then `swift`, then the counters of the defense at hand; the published matching attacks and the learned
priors from the budget `standard` on. A defense, or a part of one, for which nobody has built a counter gets the counters
that need no insight. Attacks are batched over victims, so every attack sees all of them.
"""

from gradveil.attacks.base import Budget
from gradveil.attacks.registry import registry
from gradveil.defenses.base import Defense

VERSION = "standard-v1"

CLOSED = ("linear", "rgap")
LEARNED = ("inverter", "ggl")
MATCHING = {
    "quick": ("swift",),
    "standard": ("swift", "ig", "idlg", "gradinversion", "bayes", *LEARNED),
    "thorough": (
        *("swift", "ig", "dlg", "idlg", "cpl", "gradinversion", "bayes"),
        *("adam-cosine", "adam-l1", "adam-l2", "sgd-cosine", "lbfgs-cosine", "lbfgs-l2"),
        *LEARNED,
    ),
}
GENERIC = ("layer-subsets", "expectation", "inverter")  # need only that the defense can be run


def suite_attacks(defense: Defense, budget: Budget = "quick", updates: int = 1) -> list[str]:
    """The suite for one defense: the common attacks, its counters, and what several updates of a batch allow."""
    counters = [name for name in defense.counters if name in registry]
    generic = GENERIC if any(part.stages and not part.counters for part in defense.parts) else ()
    repeated = ("repeats",) if updates > 1 and defense.random else ()
    return list(dict.fromkeys([*CLOSED, *MATCHING[budget], *counters, *generic, *repeated]))
