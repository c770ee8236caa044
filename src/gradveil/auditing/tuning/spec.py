"""What a tune is asked to do: the settings of an audit, with defenses whose strength is searched, and the wanted limits."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from gradveil import defenses as defense_methods
from gradveil.auditing.spec import CONTROL, OUTSIDE_CASE, AuditSpec, as_list, distinct, make_spec, written
from gradveil.auditing.strength import StrengthScale
from gradveil.auditing.utility import UtilityTraining
from gradveil.core.errors import UserError
from gradveil.core.options import Option
from gradveil.core.text import listing
from gradveil.defenses.base import Defense

MOST_FAMILIES = 4
# Each has a strength and an attack that is built to break it. Each begins where pictures of small networks begin to fade.
FAMILIES = ("gaussian:relative=1.0", "dpsgd:noise=0.01", "prune:ratio=0.99", "graddefense:std=0.01")  # the last go first


class TuneSpec(AuditSpec):
    """One search. Each defense stands for all its strengths; the search begins with the one that is written."""

    command_name: ClassVar[str] = "tune"

    defenses: Annotated[tuple[str | Defense, ...], Option("defense"), OUTSIDE_CASE] = Field(
        (), validate_default=True, description="Up to 4, each with a strength; the search begins there; repeat. [a few]"
    )
    victims: int = Field(16, ge=1, description="Private batches that are attacked; as many fresh ones in the end.")
    utility: Annotated[UtilityTraining | None, OUTSIDE_CASE] = Field(
        UtilityTraining(), description="Train under the settings that hold, to see their cost."
    )
    risk: Annotated[float | None, OUTSIDE_CASE] = Field(
        None, gt=0, lt=1, description="Promise at most this success of a line-up, over the rounds of the training."
    )
    strengths: Annotated[int, OUTSIDE_CASE] = Field(
        5, ge=2, le=20, description="Strengths of a defense that are audited at most."
    )

    @field_validator("defenses", mode="before")
    @classmethod
    def _defenses(cls, value: object) -> tuple[str | Defense, ...]:
        families = distinct([d for d in as_list(value) or FAMILIES if d != CONTROL], defense_methods.parse)
        if not families:
            raise UserError(f"'{CONTROL}' is no defense; name one with a strength, or none for a few of them.")
        if len(families) > MOST_FAMILIES:
            raise UserError(f"{len(families)} defenses are too many for one search; name at most {MOST_FAMILIES}.")
        scales = {written(family): StrengthScale.of(defense_methods.parse(family)) for family in families}
        for text, scale in scales.items():
            if scale is None:
                raise UserError(
                    f"'{text}' has no strength to search: one part must be gaussian, laplace, graddefense, dpsgd (by its "
                    "noise) or prune, with a value above zero."
                )
        texts = [scale.family for scale in scales.values() if scale]
        if len(set(texts)) < len(texts):
            raise UserError(f"{listing(scales)}: one defense at two strengths; name it once.")
        return families

    @property
    def scales(self) -> list[StrengthScale]:
        """The defenses, each with its strength."""
        scales = (StrengthScale.of(defense_methods.parse(defense)) for defense in self.defenses)
        return [scale for scale in scales if scale is not None]

    def audit(self, **changes: object) -> AuditSpec:
        """The audit of this case with these settings; without a cost, unless one is among them."""
        values = {name: getattr(self, name) for name in AuditSpec.model_fields}
        return make_spec({**values, "utility": None, **changes})

    def settings_to_time(self, count: int, **changes: object) -> AuditSpec:
        """An audit of so many strengths of each defense, to tell the time of a search."""
        texts = [scale.at(max(scale.level, 0.1) + step / 2) for scale in self.scales for step in range(count)]
        return self.audit(**{"defenses": texts, "utility": self.utility, **changes})

    def fresh(self, **changes: object) -> AuditSpec:
        """The audit of other victims, none of which was attacked before."""
        return self.audit(skip_victims=self.skip_victims + self.victims, **changes)
