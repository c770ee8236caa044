"""What an audit is asked to do. Each field is an option of the command line, a key in YAML and an argument of `audit`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gradveil import attacks as attack_methods
from gradveil import defenses as defense_methods
from gradveil.attacks.base import Attack, Budget
from gradveil.attacks.suite import Suite, suite_named
from gradveil.auditing.presets import preset
from gradveil.auditing.utility import UtilityTraining
from gradveil.certification.certificate import LINE_UP
from gradveil.core.errors import UserError, shown, unknown
from gradveil.core.gradients import Loss
from gradveil.core.local_training import LocalTraining
from gradveil.core.losses import DEFAULT
from gradveil.core.options import Option, option_words
from gradveil.core.settings import first_error
from gradveil.core.types import Level, Mode
from gradveil.data.catalogue import NAMED_SETS
from gradveil.defenses.base import Defense
from gradveil.federation.central import central_plan
from gradveil.storage.reading import read_yaml

SUITE = "standard"
CONTROL = "none"
LOCAL_LR = 0.01  # of local training, unless it is given
# A first overview within three minutes on two cores: the oldest baselines, weak and strong, and what servers ask for.
FIRST = ("gaussian:std=1.0", "prune:ratio=0.9", "soteria")

# Marks a field in which audits of one case may differ: they share a folder, and one resumes the other.
OUTSIDE_CASE = "outside the case"

PictureMode = Literal["none", "blurred", "shown"]


def picture_default(data: object) -> PictureMode:
    """What a page shows unasked. The images of the sets that gradveil has by name are public; all others are private."""
    return "shown" if isinstance(data, str) and data.partition(":")[0] in NAMED_SETS else "none"


class AuditSpec(BaseModel):
    """One audit. Data, model, loss, defenses and attacks may be Python objects."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)
    command_name: ClassVar[str] = "audit"

    data: Any = Field("mnist-5k", description="Name, path, or pkg.mod:factory.")
    model: Any = Field("lenet", description="Name, or pkg.mod:factory.")
    loss: Annotated[str | Loss, OUTSIDE_CASE] = Field(DEFAULT, description="Name, or pkg.mod:factory.")
    defenses: Annotated[tuple[str | Defense, ...], Option("defense"), OUTSIDE_CASE] = Field(
        (), validate_default=True, description="name:key=value,…; + combines; repeat. [a few]"
    )
    attacks: Annotated[tuple[str | Attack, ...], Option("attack"), OUTSIDE_CASE] = Field(
        (SUITE,), validate_default=True, description="name:key=value,… or the suite; repeat."
    )
    without: Annotated[tuple[str, ...], OUTSIDE_CASE] = Field((), description="Attack of the suite that is left out; repeat.")
    until_leak: Annotated[bool, OUTSIDE_CASE] = Field(
        False, description="With the suite: fast attacks first, and no others on a defense that leaks by them."
    )
    victims: int = Field(8, ge=1, description="Private batches that are attacked.")
    skip_victims: Annotated[int, OUTSIDE_CASE] = Field(  # a term of the case where it is not 0, see `Case.terms`
        0, ge=0, description="Victims that are passed over: those of an earlier audit, so that these are fresh ones."
    )
    batch_size: int = Field(1, ge=1, description="Images in a batch.")
    aggregate: Annotated[int, OUTSIDE_CASE] = Field(  # a term of the case where it is not 1, see `Case.terms`
        1, ge=1, description="Clients of which the server sees only the sum of updates: secure aggregation is assumed."
    )
    weights: str | None = Field(None, description="File with the model's weights: safetensors, or a checkpoint of torch.")
    mode: Mode = Field("train", description="What dropout and BatchNorm do on a client: train or eval.")
    local_steps: int = Field(1, ge=1, description="SGD steps on the whole batch per update. [1: a gradient]")
    local_epochs: int = Field(1, ge=1, description="Passes over the batch per update.")
    local_batch_size: int | None = Field(None, ge=1, description="Images in a mini-batch of these passes. [all]")
    local_optimizer: str = Field("sgd", description="sgd:momentum=0.9, adam, adamw:weight_decay=0.01")
    local_lr: float | None = Field(None, gt=0, description="Its learning rate; weight differences are sent. [0.01]")
    local_accumulate: int = Field(1, ge=1, description="Mini-batches per step of the optimizer.")
    frozen: tuple[str, ...] = Field((), description="Parameters that are not trained, such as 'features.*'; repeat.")
    sends_statistics: bool = Field(False, description="Clients send BatchNorm's statistics too.")
    trained_rounds: int = Field(0, ge=0, description="Federated rounds that trained the model.")
    trained_epochs: int = Field(0, ge=0, description="Central epochs that trained the model.")
    trained_by: Annotated[str, OUTSIDE_CASE] = Field(  # a term of the case where it is not sgd, see `Case.terms`
        "sgd", description="How central epochs train: adam:lr=X, sgd:lr=X,nesterov=true,milestones=N/M."
    )
    trained_under: Annotated[Literal["defense", "none"], OUTSIDE_CASE] = Field(  # a term where it is none, see `Case.terms`
        "defense", description="Training of the model: under each defense, or none, as where a federation takes one up later."
    )
    held_out: Annotated[bool, OUTSIDE_CASE] = Field(  # a term of the case where it is set, see `Case.terms`
        False, description="Victims took no part in the training of the attacked model."
    )
    knowledge: Level = "realistic"
    budget: Budget = "quick"
    seed: int = Field(0, ge=0, description="Seed of all randomness.")
    updates: int = Field(1, ge=1, description="Updates of a batch that the server sees.")
    line_up: Annotated[int | None, OUTSIDE_CASE] = Field(
        None, ge=0, description="Candidates per victim of the line-up, at most; 0: none. [1001 with the suite, else none]"
    )
    num_classes: Annotated[int | None, Option("classes")] = Field(None, ge=2, description="Number of classes. [from the data]")
    utility: Annotated[UtilityTraining | None, OUTSIDE_CASE] = Field(
        None, description="Train under each defense to see its cost."
    )
    max_loss: Annotated[float, OUTSIDE_CASE] = Field(
        10.0, ge=0, le=100, description="Percent of accuracy that a recommended defense may lose."
    )
    pictures: Annotated[PictureMode | None, OUTSIDE_CASE] = Field(
        None, description="none (not stored), blurred or shown. [shown for the public sets; else stored, but none in the page]"
    )

    @property
    def suite(self) -> Suite | None:
        """The suite among the attacks."""
        return next((suite for attack in self.attacks if (suite := suite_named(attack))), None)

    @property
    def images(self) -> int:
        """Private images behind what the server sees."""
        return self.batch_size * self.aggregate

    @property
    def candidates(self) -> int:
        """How many images stand in a line-up at most; 0: there is none."""
        return (LINE_UP if self.suite else 0) if self.line_up is None else self.line_up

    @property
    def picture_mode(self) -> PictureMode:
        """What the page shows."""
        return self.pictures or picture_default(self.data)

    @field_validator("data", "model", mode="before")
    @classmethod
    def _path_as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value

    @field_validator("defenses", mode="before")
    @classmethod
    def _defenses(cls, value: object) -> tuple[str | Defense, ...]:
        chosen = as_list(value) or [d for d in FIRST if d.partition(":")[0] in defense_methods.registry]
        return distinct([CONTROL, *chosen], defense_methods.parse)

    @field_validator("attacks", mode="before")
    @classmethod
    def _attacks(cls, value: object) -> tuple[str | Attack, ...]:
        return distinct(as_list(value) or [SUITE], lambda a: a if suite_named(a) else attack_methods.parse(a))

    @field_validator("without")
    @classmethod
    def _without(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return distinct(value, attack_methods.parse)

    @field_validator("utility", mode="before")
    @classmethod
    def _utility(cls, value: object) -> object:
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _one_training(self) -> AuditSpec:
        if self.line_up == 1:
            raise UserError("a line-up needs at least 2 candidates; --line-up 0 leaves it out.")
        if self.aggregate > 1 and self.knowledge == "upper-bound":
            raise UserError("--aggregate hides what single clients draw; --knowledge upper-bound would grant it.")
        if self.trained_under == "none" and not (self.trained_rounds or self.trained_epochs):
            raise UserError("--trained-under says how --trained-rounds or --trained-epochs train; give one of them.")
        if self.trained_rounds and self.trained_epochs:
            raise UserError("give --trained-rounds or --trained-epochs, not both.")
        if self.local_steps > 1 and (self.local_epochs > 1 or self.local_batch_size):
            raise UserError("give --local-steps, or --local-epochs and --local-batch-size, not both.")
        central_plan(self.trained_by, max(self.trained_epochs, 1), self.seed)  # refuses one that there is not
        training = self.local_training  # refuses what does not fit together, as the next line does
        if self.utility:
            self.utility.plan(training, self.batch_size, sys.maxsize, self.seed)
        return self

    @property
    def local_training(self) -> LocalTraining:
        """One gradient, unless anything is said of local training."""
        epochs = max(self.local_steps, self.local_epochs)
        said = (epochs, self.local_batch_size, self.local_optimizer, self.local_lr, self.local_accumulate)
        return LocalTraining(
            epochs=epochs,
            batch_size=self.local_batch_size,
            lr=None if said == (1, None, "sgd", None, 1) else self.local_lr or LOCAL_LR,
            optimizer=self.local_optimizer,
            mode=self.mode,
            accumulate=self.local_accumulate,
            frozen=self.frozen,
            sends_statistics=self.sends_statistics,
        )

    @property
    def in_words(self) -> bool:
        """Whether all of it is text, so that it can be sent to another process."""
        return all(isinstance(part, str) for part in (self.data, self.model, self.loss, *self.defenses, *self.attacks))

    def terms(self) -> dict[str, object]:
        """The settings that make two audits the same case."""
        fields = type(self).model_fields
        return {name: _listed(getattr(self, name)) for name, field in fields.items() if OUTSIDE_CASE not in field.metadata}

    def plain(self, **names: str) -> dict[str, object]:
        """As YAML holds it; `names` replace objects that have no text."""
        values: dict[str, object] = {name: _listed(getattr(self, name)) for name in type(self).model_fields} | names
        values["defenses"] = [written(d) for d in self.defenses]
        values["attacks"] = [written(a) for a in self.attacks]
        values["utility"] = self.utility.model_dump() if self.utility else False
        return values

    def command(self) -> str | None:
        """The command line of this audit; None where it holds Python objects."""
        return shlex.join(["gradveil", self.command_name, *option_words(self)]) if self.in_words else None


def written(method: str | Defense | Attack) -> str:
    return method if isinstance(method, str) else method.spec


def make_spec(values: Mapping[str, object], cls: type[AuditSpec] = AuditSpec) -> AuditSpec:
    """A checked spec; what does not fit raises one line. A `preset` gives the settings that are not given."""
    values = dict(values)
    if (name := values.pop("preset", None)) is not None:
        values = {**preset(str(name)), **values}
    _check_keys(values, cls)
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise UserError(first_error(error)) from None


def read_spec(file: Path, cls: type[AuditSpec] = AuditSpec, **above: object) -> AuditSpec:
    """The spec of a YAML file; the settings `above` replace its own."""
    values = read_yaml(file)
    if not isinstance(values, dict):
        raise UserError(f"{file}: an audit is written as `key: value` lines; there are: {', '.join(cls.model_fields)}.")
    values = {str(key).replace("-", "_"): value for key, value in values.items()}
    _check_keys(values.keys() - {"preset"}, cls, f"{file}: ")
    for key, value in above.items():
        below = values.get(key)
        values[key] = {**below, **value} if isinstance(value, dict) and isinstance(below, dict) else value
    return make_spec(values, cls)


def _check_keys(values: Iterable[str], cls: type[AuditSpec], where: str = "") -> None:
    names = cls.model_fields
    for key in values:
        if key not in names:
            raise UserError(where + str(unknown("setting", key, names, hint=f"There are: {', '.join(names)}.")))


def _listed(value: object) -> object:
    """As JSON and YAML hold it."""
    return list(value) if isinstance(value, tuple) else value


def as_list(value: object) -> list[object]:
    """One or many, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def distinct(methods: Iterable[object], parse: Callable[[Any], str | Defense | Attack]) -> tuple[Any, ...]:
    """Each method once, as it was first written, whatever its spelling."""
    first: dict[str, str | Defense | Attack] = {}
    for method in methods:
        if not isinstance(method, (str, Defense, Attack)):
            raise UserError(f"{shown(method)} is no method; write name or name:key=value,key=value.")
        one = method.strip() if isinstance(method, str) else method
        parsed = parse(one)
        before = first.setdefault(written(parsed), one)
        objects = not isinstance(one, str) and not isinstance(before, str)
        if type(parse(before)) is not type(parsed) or (objects and before != one):
            raise UserError(f"two different methods are written '{written(parsed)}'; give one of them another `name`.")
    return tuple(first.values())
