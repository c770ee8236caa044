"""The folder of a run: finished cells, their tensors, and the files made of them. One process at a time writes to it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from gradveil import __version__
from gradveil.core.errors import UserError
from gradveil.core.results import GradientChange, ImagePlace, ImageScores, Record, ScoreRow, Status, StorableText
from gradveil.core.types import Tensors
from gradveil.storage.files import alone_in, contents, remove_leftovers, write_tensors, write_text

_PACKAGES = ("torch", "numpy", "scipy", "safetensors", "pydantic", "pytorch-msssim")
M = TypeVar("M", bound=BaseModel)


class CellName(Protocol):
    """A piece of work: a cell of an audit, or a part of a recipe's measure. As text it says what it is."""

    @property
    def key(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def defense(self) -> str: ...
    @property
    def attack(self) -> str: ...


class Outcome(Record):
    """What a cell came to. Each kind of cell fills in its own fields."""

    status: Status = "ok"
    error: StorableText | None = None
    traceback: StorableText | None = None
    seconds: float | None = None
    rows: tuple[ScoreRow, ...] = ()  # attack, baseline
    victims: tuple[ImageScores, ...] = ()  # attack
    iterations: int | None = None  # attack
    granted: tuple[StorableText, ...] = ()  # attack: what the adversary was told
    gradient: GradientChange | None = None  # observe: the mean over victims
    changes: tuple[GradientChange | None, ...] = ()  # observe: victim by victim
    zero_updates: int = 0  # observe
    broken_updates: int = 0  # observe: not finite
    history: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)  # attack, train, utility: curves
    events: tuple[dict[str, int | StorableText | None], ...] = ()  # utility


class StoredCell(Outcome):
    """A finished cell, as its file holds it."""

    key: str
    kind: str
    defense: StorableText
    attack: StorableText
    tensors: str | None  # its file, within the folder


class Environment(Record):
    """Where and on what a run was made."""

    case: str  # a hash of all that the results rest on
    data_sha256: str
    model_sha256: str
    seed: int
    gradveil: str
    python: str
    packages: dict[str, str]
    platform: StorableText
    cpus: int | None
    seconds: float = 0.0

    @classmethod
    def here(cls, *, case: str, data_sha256: str, model_sha256: str, seed: int) -> Environment:
        """Of a run on this machine."""
        return cls(
            case=case,
            data_sha256=data_sha256,
            model_sha256=model_sha256,
            seed=seed,
            gradveil=__version__,
            python=platform.python_version(),
            packages={name: version(name) for name in _PACKAGES},
            platform=platform.platform(),
            cpus=os.cpu_count(),
        )


@dataclass(frozen=True)
class RunIdentity:
    """What a run is of: two runs of the same terms and case may share a folder, and one resumes the other."""

    environment: Environment
    terms: Mapping[str, object]
    settings: Mapping[str, object]  # enough to run it again


class RunFolder:
    """Where the cells of one case are kept."""

    def __init__(self, path: Path):
        self.path = path

    # -- one writer ----------------------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, run: RunIdentity) -> Iterator[RunFolder]:
        """Make the folder, or take up one of the same run, and keep other processes out of it meanwhile."""
        self.check(run)
        with alone_in(self.path, "audit"):
            os.chmod(self.path, 0o700)  # it will hold private images
            for part in ("cells", "tensors", "cache"):
                remove_leftovers(self.path / part)
            before = self.environment
            taken = {"seconds": before.seconds} if before else {}
            self._write("environment.json", run.environment.model_copy(update=taken))
            text = yaml.safe_dump(dict(run.settings), sort_keys=False, allow_unicode=True)
            write_text(self.path / "audit.yaml", f"# gradveil {__version__}\n{text}")
            yield self

    def check(self, run: RunIdentity) -> None:
        """Refuse a folder that is neither empty nor the folder of this run: other files are the user's."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f"{self.path} is a file; --out names a folder.")
        environment = self.environment  # written before audit.yaml
        if environment is None or not (self.path / "audit.yaml").is_file():
            # A run that was killed as it began leaves at most this file.
            if contents(self.path) - ({"environment.json"} if environment else set()):
                raise UserError(f"{self.path} is not empty and holds no audit; choose another --out.")
            return
        try:
            before = yaml.safe_load((self.path / "audit.yaml").read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, OSError):
            raise UserError(f"{self.path}/audit.yaml cannot be read; choose another --out.") from None
        before = before if isinstance(before, dict) else {}
        for name, value in run.terms.items():
            if before.get(name) != value:
                difference = f"{name} {before.get(name)}, now {value}"
                raise UserError(f"{self.path} holds another audit ({difference}); choose another --out.")
        if environment.case != run.environment.case:
            changed = "the data, the model or gradveil has changed since"
            raise UserError(f"{self.path} holds an audit of the same name, but {changed}; choose another --out.")

    def finish(self, summary: BaseModel, seconds: float) -> None:
        """Store what all cells together say."""
        before = self.environment
        if before is not None:
            self._write("environment.json", before.model_copy(update={"seconds": before.seconds + seconds}))
        self._write("summary.json", summary)

    def _write(self, name: str, content: BaseModel) -> None:
        write_text(self.path / name, content.model_dump_json(indent=1, by_alias=True) + "\n")

    @property
    def environment(self) -> Environment | None:
        file = self.path / "environment.json"
        return read_record(file, Environment, "delete it, or choose another --out") if file.is_file() else None

    @property
    def settings(self) -> str:
        """`audit.yaml` as it was written."""
        file = self.path / "audit.yaml"
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""

    @property
    def cache(self) -> Path:
        """For what is trained once and may be used again: of this run, or shared by all runs where GRADVEIL_CACHE says so."""
        shared = os.environ.get("GRADVEIL_CACHE")
        return Path(shared) if shared else self.path / "cache"

    # -- cells ---------------------------------------------------------------------------------------------------------

    def write(self, cell: CellName, outcome: Outcome, tensors: Tensors | None = None) -> StoredCell:
        """Tensors first: the file of a cell says that it is complete."""
        if tensors:
            write_tensors(self._tensor_file(cell.key), tensors)
        stored = StoredCell(
            **dict(outcome),
            key=cell.key,
            kind=cell.kind,
            defense=cell.defense,
            attack=cell.attack,
            tensors=f"tensors/{cell.key}.safetensors" if tensors else None,
        )
        self._write(f"cells/{cell.key}.json", stored)
        return stored

    def outcome(self, key: str) -> StoredCell:
        """A cell that was done in this run, failures included."""
        file = self.path / "cells" / f"{key}.json"
        cell = read_record(file, StoredCell, "delete it and resume the audit")
        if cell.key != key:
            raise UserError(f"{file} holds the cell {cell.key}; delete it and resume the audit.")
        return cell

    def read(self, key: str) -> StoredCell | None:
        """A stored cell, or None if it is still to be done: not there, damaged, or ended by an error."""
        try:
            cell = self.outcome(key)
            if cell.traceback is not None:
                return None
            if cell.tensors:
                with safe_open(self._tensor_file(key), framework="numpy"):
                    pass  # a file that was cut short does not open
            return cell
        except (UserError, OSError, SafetensorError):
            return None

    @cached_property
    def cells(self) -> dict[str, StoredCell]:
        """All cells by key. Read once, for a run that is finished."""
        return {p.stem: self.outcome(p.stem) for p in sorted((self.path / "cells").glob("*.json"))}

    def tensors(self, key: str) -> Tensors:
        return load_file(self._tensor_file(key))

    def images(self, key: str, name: str, places: Sequence[ImagePlace]) -> list[NDArray[np.floating] | None]:
        """Some images (C × H × W) of a cell, without reading the rest; None for those that are not stored."""
        file = self._tensor_file(key)
        if not file.is_file():
            return [None] * len(places)
        try:
            with safe_open(file, framework="numpy") as tensors:
                if name not in tensors.keys():  # noqa: SIM118 - the file handle is no mapping
                    return [None] * len(places)
                part = tensors.get_slice(name)
                shape = part.get_shape()
                if len(shape) != 5:
                    wanted = "victims × images × C × H × W"
                    raise UserError(f"{file}: '{name}' is {shape}, not {wanted}. Run the audit again.")
                return [
                    np.asarray(part[v : v + 1, b : b + 1])[0, 0] if v < shape[0] and b < shape[1] else None for v, b in places
                ]
        except SafetensorError as error:
            raise UserError(f"{file} cannot be read ({error}). Delete its cell and resume the audit.") from None

    def _tensor_file(self, key: str) -> Path:
        return self.path / "tensors" / f"{key}.safetensors"


def read_record(file: Path, model: type[M], remedy: str) -> M:
    """A JSON file as a record, or one clear line."""
    try:
        return model.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = ": ".join([".".join(map(str, first["loc"])), first["msg"].lower()]).removeprefix(": ")
        raise UserError(f"{file} is damaged, or gradveil did not write it ({reason}); {remedy}.") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({(error.strerror or str(error)).lower()}); {remedy}.") from None
