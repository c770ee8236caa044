"""How strong a defense is: the one setting that makes it stronger, on a scale of powers of ten."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gradveil.certification.certificate import rounded_up
from gradveil.defenses.base import Defense
from gradveil.defenses.gradient.dpsgd import NOISE, DpSgd
from gradveil.defenses.gradient.graddefense import GradDefense
from gradveil.defenses.update.noise import Gaussian, Laplace
from gradveil.defenses.update.prune import Prune

NEAR = math.log10(2)  # two settings closer than this factor have none between them that is worth an audit


@dataclass(frozen=True)
class Strength:
    """The setting of one class of defenses."""

    setting: str
    share: bool = False  # of the update that is left out: then what remains counts

    def name(self, defense: Defense) -> str:
        return "relative" if getattr(defense, "relative", None) is not None else self.setting

    def level(self, defense: Defense) -> float | None:
        value: Any = getattr(defense, self.name(defense))
        if any(getattr(defense, name, None) is not None for name in ("epsilon", "risk")):
            return None
        value = NOISE if value is None else value
        left = 1 - value if self.share else value
        return (-1 if self.share else 1) * math.log10(left) if left > 0 else None

    def at(self, defense: Any, level: float, *, at_least: bool = False) -> str:
        """The text of the defense at another level; the setting stands in it even where it is the default."""
        rest = float(f"{10 ** (-level if self.share else level):.2g}")
        if at_least:
            factor = float(rounded_up(10**level, 3).replace(",", ""))
            rest = 1 / factor if self.share else factor
        value = round(1 - rest, 9) if self.share else rest
        name = self.name(defense)
        text: str = replace(defense, **{name: value}).spec
        return text if f"{name}=" in text else f"{text}{',' if ':' in text else ':'}{name}={value}"


# `clip` is not among them: a smaller norm only rescales the update, and no attack depends on its size.
STRENGTHS: Mapping[type[Defense], Strength] = {
    Gaussian: Strength("std"),
    Laplace: Strength("scale"),
    GradDefense: Strength("std"),
    DpSgd: Strength("noise"),
    Prune: Strength("ratio", share=True),
}


@dataclass(frozen=True)
class StrengthScale:
    """One defense at all its strengths. Of a combination, one part has a strength and the others stay as they are."""

    defense: Defense
    part: Defense
    strength: Strength
    level: float  # of the defense itself

    @classmethod
    def of(cls, defense: Defense) -> StrengthScale | None:
        """None where no part has a strength, more than one has, or it is written in another way."""
        parts = [part for part in defense.parts if type(part) in STRENGTHS]
        if len(parts) != 1:
            return None
        strength = STRENGTHS[type(parts[0])]
        level = strength.level(parts[0])
        return None if level is None else cls(defense, parts[0], strength, level)

    @property
    def least(self) -> float | None:
        """The level at which nothing is done; None: there is none above zero."""
        return 0.0 if self.strength.share else None

    @property
    def ends(self) -> tuple[float, float]:
        """The levels beyond which no number is told from the next, or is none."""
        return (0.0, 9.0) if self.strength.share else (-30.0, 30.0)

    @property
    def name(self) -> str:
        """`clip+gaussian`, without settings."""
        return "+".join(part.name for part in self.defense.parts)

    @property
    def family(self) -> str:
        """The same text for all strengths of one defense."""
        return self.at(0.5)

    def at(self, level: float, *, at_least: bool = False) -> str:
        parts = [(p, self.strength.at(p, level, at_least=at_least) if p is self.part else p.spec) for p in self.defense.parts]
        return "+".join(text for _, text in parts)
