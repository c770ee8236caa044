"""An audited defense as a file: what it was audited on, in which units, and how much it changed the updates there.

`gradveil export` writes it; a shield, a guard, a mod and `protect_arrays` read it, and refuse to act in other units. The
file holds values and no code: its defense must be registered where it is read.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypedDict, TypeVar, cast

from pydantic import ConfigDict, Field, model_validator

from gradveil import __version__
from gradveil.core.errors import UserError, shown
from gradveil.core.local_training import LocalTraining, optimizer
from gradveil.core.results import GradientChange, Record, StorableText
from gradveil.core.settings import build, split_chain
from gradveil.core.text import listing, plural, shorten
from gradveil.core.types import Kind, Mode
from gradveil.defenses import Defense, parse, registry
from gradveil.defenses.base import Refused
from gradveil.storage.files import check_replaceable, write_text
from gradveil.storage.run_folder import parse_record, record_content

SCHEMA: Final = 1
FILE = "protection.json"
OUTSIDE = 2.0  # factor beyond the audited lengths from which the log warns
_MARK = '"format": "gradveil protection"'
_KINDS = {"gradient": "gradients", "delta": "weight differences"}
# Where Flower's templates keep the settings of local training.
CONFIG_KEYS = {"lr": ("lr", "learning-rate"), "epochs": ("local-epochs",), "batch_size": ("batch-size",)}
_NAMES = {"lr": "learning rate", "epochs": "number of local epochs", "batch_size": "batch size"}


class _Strict(Record):
    model_config = ConfigDict(extra="forbid", validate_by_name=True, serialize_by_alias=True)


class Spread(_Strict):
    """One number over the audited updates."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), min=min(values), max=max(values))


class AuditedTask(_Strict):
    """The task of the audit."""

    model: StorableText
    parameters: dict[StorableText, tuple[int, ...]]  # shapes of the trained ones, by name
    input_shape: tuple[int, int, int]
    num_outputs: int
    mean: tuple[float, ...]  # per channel
    std: tuple[float, ...]
    loss: StorableText


class Units(_Strict):
    """What the size of an update depends on."""

    kind: Kind
    steps: int  # of the optimiser, per update
    lr: float | None  # None: one gradient is sent

    def __str__(self) -> str:
        if self.lr is None:
            return "one gradient per update"
        return f"weight differences after {plural(self.steps, 'step')} at learning rate {self.lr:g}"


class AuditedChange(_Strict):
    """What the defense did to the updates of the audit."""

    updates: int
    norm: Spread  # of the undefended updates
    noise_ratio: Spread  # length of the change as a share of the undefended update's
    cosine: Spread | None  # of the undefended update and the one sent

    @classmethod
    def of(cls, changes: Iterable[GradientChange | None]) -> AuditedChange:
        measured = [c for c in changes if c is not None]
        norms, ratios = [c.norm for c in measured if c.norm], [c.noise_ratio for c in measured if c.noise_ratio is not None]
        if not measured or not len(norms) == len(ratios) == len(measured):
            raise UserError("the audit has not measured how much the defense changes each update; run it again.")
        cosines = [c.cosine for c in measured if c.cosine is not None]
        cosine = Spread.of(cosines) if len(cosines) == len(measured) else None
        return cls(updates=len(measured), norm=Spread.of(norms), noise_ratio=Spread.of(ratios), cosine=cosine)


class Protection(_Strict):
    """A defense together with the task, the local training and the units it was audited in."""

    format: Literal["gradveil protection"] = "gradveil protection"
    schema_version: Literal[1] = Field(default=SCHEMA, alias="schema")
    gradveil: str = __version__
    defense: StorableText
    versions: dict[StorableText, int]  # of the parts of the defense
    verdict: StorableText
    leak_accepted: bool = False  # updates leak under it, and it was exported in spite of that
    scope: StorableText
    task: AuditedTask
    training: LocalTraining
    images: int = Field(ge=1)  # of one client in a round
    units: Units
    measured: AuditedChange

    @model_validator(mode="after")
    def _consistent(self) -> Protection:
        if self.units != units_of(self.training, self.images):
            raise ValueError("the units are not those of the local training")
        if self.leak_accepted != (self.verdict == "leaks"):
            raise ValueError("a defense under which updates leak is exported only where that was accepted")
        return self

    @classmethod
    def read(cls, path: str | Path) -> Protection:
        return read_exported(Path(path))[0]

    def text(self) -> str:
        """The content of its file."""
        return self.model_dump_json(indent=1) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write the file. Only an exported protection is replaced."""
        check_replaceable(Path(path), _MARK)
        write_text(Path(path), self.text())
        return Path(path)


def read_exported(file: Path) -> tuple[Protection, str]:
    """The protection of a file, and the SHA-256 of the very bytes it was read from."""
    content = record_content(file, remedy := "export it again")
    return parse_record(content, Protection, file, remedy), hashlib.sha256(content).hexdigest()


def registered(text: str) -> Defense:
    """The defense that a file names. A file never makes us import something: the user's classes are registered before."""
    for part in split_chain(text):
        if (name := part.partition(":")[0]) not in registry:
            remedy = "register its class with @gradveil.defense, and import that first"
            raise UserError(f"{shown(part)}: no defense is registered as '{shorten(name, 80)}' here; {remedy}.")
    return parse(text)


def units_of(training: LocalTraining, images: int) -> Units:
    return Units(kind=training.kind, steps=training.number_of_steps(images), lr=training.lr)


def versions_of(defense: Defense) -> dict[str, int]:
    return {part.name: part.version for part in defense.parts}


# -- where it is used --------------------------------------------------------------------------------------------------

# The text of a defense, the path of an exported file (a text that ends with .json is one), or an object.
DefenseSource = str | Path | Defense | Protection
T = TypeVar("T")


def options_of(kind: type[T], options: Mapping[str, object]) -> T:
    """Those of the options that belong to one kind of them."""
    return cast("T", {name: value for name, value in options.items() if name in kind.__annotations__})


class AuditOptions(TypedDict, total=False):
    """What a client states where it acts by an exported protection."""

    training: LocalTraining  # what the client does in a round
    images: int  # on how many images
    beyond_audit: bool  # act also where the audit says nothing: other units or another task


@dataclass(frozen=True)
class Audited:
    """A defense that is to act, and what an audit says of it, if it comes from an export."""

    defense: Defense
    protection: Protection | None = None
    sha256: str = ""  # of the protection's file
    training: LocalTraining | None = None  # as stated, of this client
    images: int | None = None
    beyond_audit: bool = False

    @classmethod
    def of(cls, source: DefenseSource, options: AuditOptions | None = None) -> Audited:
        stated, sha256 = options or {}, ""
        if isinstance(source, Path) or (isinstance(source, str) and source.endswith(".json")):
            source, sha256 = read_exported(Path(source))
        if not isinstance(source, Protection):
            if stated:
                raise UserError(f"{listing(sorted(stated))}: only an exported protection says what it was audited with.")
            return cls(parse(source))
        defense = registered(source.defense)
        audited = cls(defense, source, sha256 or hashlib.sha256(source.text().encode()).hexdigest(), **stated)
        before, now = source.versions, versions_of(defense)
        changed = [f"version {v} of '{n}', not {before.get(n)}" for n, v in now.items() if before.get(n) != v]
        audited.refuse(changed)
        return audited

    def refuse(self, differences: Sequence[str]) -> None:
        """Refuse to act outside the audit, unless that is wanted."""
        if self.protection and differences and not self.beyond_audit:
            raise Refused(
                f"the audit of '{self.defense.spec}' does not cover this client ({'; '.join(differences)}); nothing is sent. "
                "Audit it as it is, or act all the same with beyond_audit=True."
            )

    def client_training(self, configs: Mapping[str, Mapping[str, object]]) -> LocalTraining | None:
        """What the client does in a round, as stated and as `configs` say (by where they are from); None: nobody asks."""
        if self.protection is None or self.beyond_audit:
            return None
        values: dict[str, object] = {}
        for field, keys in CONFIG_KEYS.items():
            said = {f"{key} of the {where}": c[key] for where, c in configs.items() for key in keys if key in c}
            if self.training is not None and (stated := getattr(self.training, field)) is not None:
                said["training"] = stated
            if len({repr(_number(value)) for value in said.values()}) > 1:
                text = listing(f"{shown(value)} by {where}" for where, value in said.items())
                raise Refused(f"the {_NAMES[field]} is {text}; nothing is sent.")
            if said:
                values[field] = next(iter(said.values()))
        if self.training is not None:
            return self.training
        if missing := [_NAMES[field] for field in CONFIG_KEYS if field not in values]:
            state = "state training=gradveil.LocalTraining(lr=…, epochs=…, batch_size=…)"
            raise Refused(f"the {listing(missing)} of this client cannot be known here; {state}. Nothing is sent.")
        # The rest of local training is written nowhere: `training` states it, or it is not compared.
        fixed = {f: getattr(self.protection.training, f) for f in ("optimizer", "mode", "accumulate", "frozen")}
        return build(LocalTraining, fixed | values, of="the client's settings")

    def check(self, training: LocalTraining | None, images: int | None) -> None:
        """Refuse other units than the audited ones. Without `images` the steps are left out: they are checked later."""
        protection = self.protection
        if protection is None or training is None:
            return
        audited, different = protection.training, []
        if training.kind != audited.kind:
            different.append(f"it sends {_KINDS[training.kind]}, not {_KINDS[audited.kind]}")
        elif audited.lr is not None and training.lr is not None and not math.isclose(audited.lr, training.lr, rel_tol=1e-6):
            different.append(f"learning rate {training.lr:g}, not {audited.lr:g}")
        if images is not None and (steps := units_of(training, images).steps) != protection.units.steps:
            different.append(f"{plural(steps, 'local step')}, not {protection.units.steps}")
        elif images is not None and images < protection.images:  # the fewer, the more of each image is in the update
            different.append(f"{plural(images, 'image')}, not {protection.images} or more")
        if optimizer(training.optimizer) != optimizer(audited.optimizer):
            different.append(f"optimizer {training.optimizer}, not {audited.optimizer}")
        if training.sampling != audited.sampling:
            different.append(f"{training.sampling} mini-batches, not {audited.sampling} ones")
        if training.mode != audited.mode:
            different.append(f"model in {training.mode} mode, not {audited.mode}")
        self.refuse(different)

    def check_images(self, training: LocalTraining | None, images: int | None) -> None:
        """The same where an update is about to leave, so that the steps must be known."""
        if training is None:
            return
        if self.images is not None and images is not None and self.images != images:
            raise Refused(f"the client trained on {plural(images, 'image')}, images={self.images} was stated; nothing is sent.")
        if (images := images or self.images) is None:
            raise Refused("the local steps cannot be known without the number of images; state images=…. Nothing is sent.")
        self.check(training, images)

    def check_tensors(self, shapes: Iterable[Sequence[int]]) -> None:
        """Refuse an update of other tensors than the audited ones. Their names may differ between engines."""
        if self.protection is None:
            return
        sent, audited = Counter(map(tuple, shapes)), Counter(map(tuple, self.protection.task.parameters.values()))
        if sent != audited:
            count = f"{plural(sent.total(), 'trained tensor')}, not the {audited.total()} of {self.protection.task.model}"
            self.refuse([count if sent.total() != audited.total() else "trained tensors of other shapes"])

    def check_model(self, mode: Mode, shapes: Iterable[Sequence[int]]) -> None:
        """The same where the model is at hand."""
        self.check_tensors(shapes)
        if self.protection is not None and mode != self.protection.training.mode:
            self.refuse([f"model in {mode} mode, not {self.protection.training.mode}"])

    def check_statistics(self, sent: bool) -> None:
        if self.protection is not None and sent and not self.protection.training.sends_statistics:
            self.refuse(["buffers are sent, and the audit was without --sends-statistics"])

    def in_words(self, change: GradientChange | None) -> tuple[str, bool]:
        """For the log: the file, its units and how much was changed, and whether the update had an unusual size."""
        amount = "" if change is None or change.noise_ratio is None else f" and changed the update by {change.noise_ratio:.1%}"
        if (protection := self.protection) is None:
            return amount, False
        ratio, norm = protection.measured.noise_ratio, protection.measured.norm
        amount += f" (in the audit {ratio.min:.1%} to {ratio.max:.1%})" if amount else ""
        units = f"; protection {self.sha256[:12]}, audited for {protection.units}"
        units += ", used beyond its audit" if self.beyond_audit else ""
        if change is None or change.norm is None or norm.min / OUTSIDE <= change.norm <= norm.max * OUTSIDE:
            return amount + units, False
        return f"{amount}{units}; its length was {change.norm:.3g}, in the audit {norm.min:.3g} to {norm.max:.3g}", True


def _number(value: object) -> object:
    """Settings come as numbers or as their texts."""
    try:
        return float(value) if isinstance(value, str | int | float) else value
    except ValueError:
        return value
