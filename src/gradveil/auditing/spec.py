"""What an audit is asked to do: the options of the command line, the keys of a YAML file, the arguments of `audit`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gradveil import attacks as attack_methods
from gradveil import defenses as defense_methods
from gradveil.attacks.base import Attack, Budget
from gradveil.core.errors import UserError, shown, unknown
from gradveil.core.losses import DEFAULT
from gradveil.core.types import Level
from gradveil.defenses.base import Defense
from gradveil.federation import FederationPlan

SUITE = "standard"
CONTROL = "none"
# A first picture within three minutes on two cores: the oldest baselines, weak and strong, and what servers ask for.
FIRST = ("gaussian:std=1.0", "prune:ratio=0.9", "soteria")


class UtilityTraining(BaseModel):
    """The federated training that measures what a defense costs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rounds: int = Field(20, ge=1)
    clients: int = Field(10, ge=1)
    images: int = Field(200, ge=1)  # of each client
    model: str = "cnn"
    lr: float = Field(0.05, gt=0)
    defended: Literal["all"] | Annotated[int, Field(ge=1)] = "all"  # or how many clients: crafting defenses cost much

    def plan(self, available: int, seed: int) -> FederationPlan:
        """As many clients and images as asked for, or as `available` images allow."""
        clients = min(self.clients, available)
        images = min(self.images, available // clients)
        return FederationPlan(
            rounds=self.rounds,
            clients=clients,
            images_per_client=images,
            lr=self.lr,
            defended=self.defended,
            seed=seed,
        )


class AuditSpec(BaseModel):
    """One audit. `data` and `model` may be Python objects; so may defenses and attacks."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    data: Any = "mnist-5k"
    model: Any = "lenet"
    loss: Any = DEFAULT  # or multi-label, regression, pkg.mod:factory, a function of (outputs, targets)
    defenses: tuple[str | Defense, ...] = Field((), validate_default=True)
    attacks: tuple[str | Attack, ...] = Field((SUITE,), validate_default=True)
    victims: int = Field(8, ge=1)
    batch_size: int = Field(1, ge=1)
    local_steps: int = Field(1, ge=1)  # more than one: the weight delta of so many full-batch SGD steps is sent
    local_lr: float = Field(0.01, gt=0)
    trained_rounds: int = Field(0, ge=0)
    trained_epochs: int = Field(0, ge=0)
    knowledge: Level = "realistic"
    budget: Budget = "quick"
    seed: int = Field(0, ge=0)
    updates: int = Field(1, ge=1)  # of the same batch, as the server sees them
    num_classes: int | None = Field(None, ge=2)
    utility: UtilityTraining | None = None
    pictures: Literal["none", "blurred", "shown"] = "blurred"

    @field_validator("data", "model", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("defenses", mode="before")
    @classmethod
    def _defenses(cls, value: Any) -> tuple[str | Defense, ...]:
        given = _several(value) or [d for d in FIRST if d.partition(":")[0] in defense_methods.registry]
        return _distinct([CONTROL, *given], lambda d: defense_methods.parse(d).spec)

    @field_validator("attacks", mode="before")
    @classmethod
    def _attacks(cls, value: Any) -> tuple[str | Attack, ...]:
        return _distinct(_several(value) or [SUITE], lambda a: a if a == SUITE else attack_methods.parse(a).spec)

    @field_validator("utility", mode="before")
    @classmethod
    def _utility(cls, value: Any) -> Any:
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _one_training(self) -> AuditSpec:
        if self.trained_rounds and self.trained_epochs:
            raise UserError("give --trained-rounds or --trained-epochs, not both.")
        return self

    @property
    def in_words(self) -> bool:
        """Whether all of it is text, so that another process can be told what to do."""
        return all(isinstance(part, str) for part in (self.data, self.model, self.loss, *self.defenses, *self.attacks))

    def plain(self, **names: str) -> dict[str, Any]:
        """As YAML holds it; `names` stand for the objects that have no text of their own."""
        values: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields} | names
        values["defenses"] = [written(d) for d in self.defenses]
        values["attacks"] = [written(a) for a in self.attacks]
        values["utility"] = self.utility.model_dump() if self.utility else False
        return values

    def command(self) -> str | None:
        """The command line of this audit, if there is one."""
        if not self.in_words:
            return None
        words = ["gradveil", "audit"]
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            option = "--" + {"num_classes": "classes"}.get(name, name).replace("_", "-")
            if name in ("defenses", "attacks"):
                default = getattr(AuditSpec(), name)
                words += [w for v in value for w in (option[:-1], v)] if value != default else []
            elif name == "utility":
                words += [option] if value else []
            elif value != field.default:
                words += [option, str(value)]
        return shlex.join(words)


def written(method: str | Defense | Attack) -> str:
    return method if isinstance(method, str) else method.spec


def make_spec(values: dict[str, Any]) -> AuditSpec:
    """A checked spec, or one line on what does not fit."""
    _check_keys(values)
    try:
        return AuditSpec.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{where}={shown(first['input'])}: {first['msg'].lower()}.") from None


def read_spec(file: Path, **given: Any) -> AuditSpec:
    """The spec of a YAML file; what is `given` beside it goes before."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {(error.strerror or 'cannot be read').lower()}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: an audit is written as `key: value` lines; there are: {_fields()}.")
    values = {str(key).replace("-", "_"): value for key, value in values.items()}
    _check_keys(values, f"{file}: ")
    return make_spec(values | given)


def _check_keys(values: Iterable[str], where: str = "") -> None:
    for key in values:
        if key not in AuditSpec.model_fields:
            raise UserError(
                where + str(unknown("setting", key, AuditSpec.model_fields, hint=f"There are: {_fields()}."))
            )


def _fields() -> str:
    return ", ".join(AuditSpec.model_fields)


def _several(value: Any) -> list[Any]:
    """One or many, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _distinct(methods: list[Any], meaning: Callable[[Any], str]) -> tuple[Any, ...]:
    """Each method once, as it was first written, whatever its spelling."""
    first: dict[str, Any] = {}
    for method in methods:
        if not isinstance(method, (str, Defense, Attack)):
            raise UserError(f"{shown(method)} is no method; write name or name:key=value,key=value.")
        one = method.strip() if isinstance(method, str) else method
        first.setdefault(meaning(one), one)
    return tuple(first.values())
