"""The folder of a run: finished cells, their tensors, and the files made of them. One process at a time writes to it."""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from gradveil import __version__
from gradveil.core.errors import UserError, shown
from gradveil.core.results import GradientChange, ImagePlace, ImageScores, Record, ScoreRow, Sight, Status, StorableText
from gradveil.core.text import shorten
from gradveil.core.types import Tensors
from gradveil.storage.environment import Environment
from gradveil.storage.files import alone_in, contents, remove_leftovers, write_tensors, write_text
from gradveil.storage.reading import MAX_JSON, check_json, read_bytes, read_text, read_yaml, unreadable
from gradveil.storage.tensor_file import TensorFile, open_tensors

MARKER = ".gradveil-run"  # a folder with this file is a run's
MAX_CELLS = 20_000  # in a folder
MAX_TENSOR_BYTES = 1 << 40  # of a cell's file in an audit
MAX_PICTURE_BYTES = 1 << 30  # of a cell's file from which a page takes pictures
MAX_PIXELS = 1 << 26  # of one picture, all channels
_MARK = "This folder belongs to a run of gradveil. What else lies here stays untouched.\n"
_SEAL = b',\n "sha256": '  # before the hash of all that stands before it
_PARTS = ("cells", "tensors", "cache", "checkpoints")
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


Curve = tuple[float | None, ...]  # one value per round or step; None: not measured


class Outcome(Record):
    """What a cell came to. Each kind of cell fills in its own fields."""

    status: Status = "ok"
    error: StorableText | None = None
    traceback: StorableText | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None  # of the whole cell; an attack's `seconds` are without scoring and storing
    expected_cpu_seconds: float | None = None  # of a cell that was left out because it takes too long
    rows: tuple[ScoreRow, ...] = ()  # attack, baseline
    victims: tuple[ImageScores, ...] = ()  # attack
    likeness: tuple[tuple[float, ...], ...] = ()  # attack, look: per batch, of all victims and strangers of its classes
    sights: tuple[Sight, ...] = ()  # look: per victim
    ranks: tuple[tuple[int, int], ...] = ()  # line-up: per victim, and the number of candidates
    iterations: int | None = None  # attack
    granted: tuple[StorableText, ...] = ()  # attack: what the adversary was told
    gradient: GradientChange | None = None  # observe: the mean over victims
    changes: tuple[GradientChange | None, ...] = ()  # observe: victim by victim
    agreement: float | None = None  # observe: with the undefended updates up to their size, at the least; 1 is equal
    zero_updates: int = 0  # observe
    broken_updates: int = 0  # observe: not finite
    history: dict[str, Curve] = Field(default_factory=dict)  # attack, train, utility: curves
    server_lr: float | None = None  # utility: the one that was chosen
    events: tuple[dict[str, int | StorableText | None], ...] = ()  # utility


class StoredCell(Outcome):
    """A finished cell, as its file holds it."""

    key: str
    kind: str
    defense: StorableText
    attack: StorableText
    tensors_sha256: str | None  # of the bytes of its tensors file

    @classmethod
    def of(cls, cell: CellName, outcome: Outcome, sha256: str | None = None) -> StoredCell:
        names = {name: getattr(cell, name) for name in ("key", "kind", "defense", "attack")}
        return cls(**dict(outcome), **names, tensors_sha256=sha256)

    def sealed(self) -> str:
        """The text of its file: JSON, at its end the SHA-256 of all that stands before."""
        text = self.model_dump_json(indent=1).removesuffix("\n}")
        return f'{text}{_SEAL.decode()}"{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'


class Damaged(UserError):
    """A stored cell does not hold what was written. It can be computed again."""


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
            write_text(self.path / MARKER, _MARK)
            self._remove_leftovers()
            before = self.environment
            kept = {"seconds": before.seconds, "finished": before.finished} if before else {}
            self._write("environment.json", run.environment.model_copy(update=kept))
            text = yaml.safe_dump(dict(run.settings), sort_keys=False, allow_unicode=True)
            write_text(self.path / "audit.yaml", f"# gradveil {__version__}\n{text}")
            try:
                yield self
            finally:
                self._remove_leftovers()  # of workers that were stopped

    def _remove_leftovers(self) -> None:
        for part in _PARTS:
            remove_leftovers(self.path / part)

    def check(self, run: RunIdentity) -> None:
        """Refuse a folder that is neither empty nor the folder of this run: other files are the user's."""
        if not self._is_ours():
            return
        environment = self.environment
        if environment is None or not os.path.lexists(self.path / "audit.yaml"):  # killed as it began
            return
        before = read_yaml(self._file("audit.yaml"))
        terms = before if isinstance(before, dict) else {}
        for name, value in run.terms.items():
            if terms.get(name) != value:
                difference = f"{name} {shorten(str(terms.get(name)), 80)}, now {shorten(str(value), 80)}"
                raise UserError(f"{self.path} holds another audit ({difference}); choose another --out.")
        if environment.case != run.environment.case:
            changed = "the data, the model or gradveil has changed since"
            raise UserError(f"{self.path} holds an audit of the same name, but {changed}; choose another --out.")
        if run.settings.get("pictures") == "none" != terms.get("pictures"):
            raise UserError(f"{self.path} holds images that were stored without --pictures none; choose another --out.")

    def _is_ours(self) -> bool:
        """Whether the folder holds a run. False where there is none, or an empty folder of the user that can become one."""
        try:
            try:
                os.lstat(self.path)
            except FileNotFoundError:
                return False
            status = os.stat(self.path)
            if not stat.S_ISDIR(status.st_mode):
                raise UserError(f"{self.path} is a file; --out names a folder.")
            names = contents(self.path)
        except (OSError, ValueError) as error:  # a link to nothing, a name that is too long, a NUL
            raise UserError(f"{str(unreadable(self.path, error)).removesuffix('.')}; choose another --out.") from None
        if MARKER in names:
            for part in _PARTS:
                if os.path.lexists(self.path / part) and not stat.S_ISDIR(os.lstat(self.path / part).st_mode):
                    raise UserError(f"{self.path / part} is not a folder of this run, or a link; choose another --out.")
            if read_bytes(self._file(MARKER)) == _MARK.encode():
                return True
        if names:
            raise UserError(f"{self.path} is not empty and holds no audit; choose another --out.")
        if status.st_mode & stat.S_ISVTX or (hasattr(os, "geteuid") and status.st_uid != os.geteuid()):
            raise UserError(f"{self.path} is shared with other users; choose another --out.")
        return False

    def finish(self, summary: BaseModel, seconds: float) -> None:
        """Store what all cells together say. A run that was only looked at again stays as it is, and so does its hash."""
        before = self.environment
        if before is not None and before.finished is not None and self._holds("summary.json", summary):
            return
        if before is not None:
            update = {"seconds": before.seconds + seconds, "finished": datetime.now(UTC).replace(microsecond=0)}
            self._write("environment.json", before.model_copy(update=update))
        self._write("summary.json", summary)

    def _write(self, name: str, content: BaseModel) -> None:
        write_text(self.path / name, _json(content))

    def _holds(self, name: str, content: BaseModel) -> bool:
        file, text = self.path / name, _json(content).encode()
        regular = file.is_file() and not file.is_symlink()
        return regular and file.stat().st_size == len(text) and read_bytes(file, len(text)) == text

    @property
    def environment(self) -> Environment | None:
        if not os.path.lexists(self.path / "environment.json"):
            return None
        return read_record(self._file("environment.json"), Environment, "delete it, or choose another --out")

    @property
    def settings(self) -> str:
        """`audit.yaml` as it was written."""
        return read_text(self._file("audit.yaml")) if os.path.lexists(self.path / "audit.yaml") else ""

    def _file(self, *names: str) -> Path:
        """A file of this folder. Links are refused: they could lead out of it."""
        for i in range(len(names)):
            if (part := self.path.joinpath(*names[: i + 1])).is_symlink():
                raise UserError(f"{part} is a link, which is not followed; remove it.")
        return self.path.joinpath(*names)

    @property
    def cache(self) -> Path:
        """For what is trained once and may be used again: of this run, or shared by all runs where GRADVEIL_CACHE says so."""
        shared = os.environ.get("GRADVEIL_CACHE")
        return Path(shared) if shared else self.path / "cache"

    def checkpoint(self, key: str) -> Path:
        """Where a cell at work keeps the state of its search."""
        return self._file("checkpoints", f"{key}.safetensors")

    # -- cells ---------------------------------------------------------------------------------------------------------

    def write(self, cell: CellName, outcome: Outcome, tensors: Tensors | None = None) -> StoredCell:
        """Tensors first: the file of a cell says that it is complete."""
        file = self._tensor_file(cell.key)
        if tensors:
            write_tensors(file, tensors)
            _check_readable(file)
        stored = StoredCell.of(cell, outcome, _sha256(file) if tensors else None)
        write_text(self.path / "cells" / f"{cell.key}.json", stored.sealed())
        return stored

    def outcome(self, key: str) -> StoredCell:
        """A cell that was done in this run, failures included."""
        file = self._file("cells", f"{key}.json")
        remedy = "delete it and resume the audit"
        content = record_content(file, remedy)
        intact = _is_sealed(content)
        try:
            cell = parse_record(content, StoredCell, file, remedy)
        except UserError:
            if intact:
                raise Damaged(f"{file} was written by another version of gradveil; {remedy}.") from None
            raise
        if cell.key != key:
            raise Damaged(f"{file} holds the cell {shown(cell.key)}; {remedy}.")
        if not intact:
            raise Damaged(f"{file} does not hold what was written; {remedy}.")
        return cell

    def read(self, key: str, say: Callable[[str], object] = lambda _: None) -> StoredCell | None:
        """A stored cell, or None if it is to be done: not there, not run, ended by an error, or damaged (`say` is told)."""
        if not os.path.lexists(self.path / "cells" / f"{key}.json"):
            return None
        try:
            cell = self.outcome(key)
            if cell.traceback is None and cell.tensors_sha256:
                with self._open_tensors(cell, MAX_TENSOR_BYTES):
                    pass
        except UserError as error:
            say(f"computed again: {str(error).rpartition('; ')[0]}")  # without what a reader of reports would have to do
            return None
        return cell if cell.traceback is None and cell.status != "not run" else None

    @cached_property
    def cells(self) -> dict[str, StoredCell]:
        """All cells by key. Read once, for a run that is finished."""
        try:
            names = sorted(os.listdir(self._file("cells"))) if os.path.lexists(self.path / "cells") else []
        except OSError as error:
            raise unreadable(self.path / "cells", error) from None
        keys = [name.removesuffix(".json") for name in names if name.endswith(".json") and not name.startswith(".")]
        if len(keys) > MAX_CELLS:
            raise UserError(f"{self.path / 'cells'}: {len(keys):,} cells; at most {MAX_CELLS:,} are read.")
        return {key: self.outcome(key) for key in keys}

    def tensors(self, key: str) -> Tensors:
        """The tensors of a cell, as they were written."""
        with self._open_tensors(self.outcome(key), MAX_TENSOR_BYTES) as file:
            return file.tensors()

    def shapes(self, cell: StoredCell) -> dict[str, tuple[int, ...]]:
        """The shapes of a cell's tensors by name, without reading their values."""
        with self._open_tensors(cell, MAX_TENSOR_BYTES) as file:
            return {name: tuple(place.shape) for name, place in file.places.items()}

    def images(self, cell: StoredCell, name: str, places: Sequence[ImagePlace]) -> list[NDArray[np.floating] | None]:
        """Images (C × H × W) of a cell, without reading the rest; None for those that are not stored."""
        if cell.tensors_sha256 is None:
            return [None] * len(places)
        with self._open_tensors(cell, MAX_PICTURE_BYTES) as file:
            if name not in file.places:
                return [None] * len(places)
            place = file.places[name]
            if len(place.shape) != 5 or not place.dtype.is_floating_point or not 0 < math.prod(place.shape[2:]) <= MAX_PIXELS:
                wanted = "victims × images × C × H × W"
                raise UserError(f"{file.path}: '{name}' is {place.dtype} of {place.shape}, not {wanted}. Run the audit again.")
            victims, images = place.shape[:2]
            return [file.read(name, v, i).float().numpy() if 0 <= v < victims and 0 <= i < images else None for v, i in places]

    @contextmanager
    def _open_tensors(self, cell: StoredCell, limit: int) -> Iterator[TensorFile]:
        """The tensors file of a cell, if it holds what was written."""
        file = self._tensor_file(cell.key)
        try:
            with open_tensors(self._file("tensors", file.name), limit) as tensors:
                tensors.file.seek(0)
                if hashlib.file_digest(tensors.file, "sha256").hexdigest() != cell.tensors_sha256:
                    raise UserError(f"{file} does not hold what was written.")
                yield tensors
        except UserError as error:
            raise Damaged(f"{str(error).removesuffix('.')}; delete its cell and resume the audit.") from None

    def _tensor_file(self, key: str) -> Path:
        return self.path / "tensors" / f"{key}.safetensors"


def _json(content: BaseModel) -> str:
    return content.model_dump_json(indent=1, by_alias=True) + "\n"


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _check_readable(file: Path) -> None:
    """Delete what was written and would be refused: a kind of number, a name or a number of tensors that is not read."""
    try:
        with open_tensors(file, MAX_TENSOR_BYTES):
            return
    except UserError as error:
        file.unlink()
        raise ValueError(f"its tensors cannot be stored: {str(error).partition('(')[2].rpartition(')')[0]}") from None


def _is_sealed(content: bytes) -> bool:
    """Whether the hash at the end is that of the text before it. It needs no fields, so it holds for every version."""
    text, _, seal = content.rpartition(_SEAL)
    return seal.strip() == f'"{hashlib.sha256(text).hexdigest()}"\n}}'.encode()


def read_record(file: Path, model: type[M], remedy: str) -> M:
    """A JSON file as a record, or one clear line."""
    return parse_record(record_content(file, remedy), model, file, remedy)


def record_content(file: Path, remedy: str) -> bytes:
    if file.is_symlink():
        raise UserError(f"{file} is a link, which is not followed; remove it.")
    try:
        check_json(content := read_bytes(file, MAX_JSON), file)
        return content
    except UserError as error:
        reason = str(error).removeprefix(f"{file}: ").removesuffix(".")
        raise UserError(f"{file} is damaged, or gradveil did not write it ({reason}); {remedy}.") from None


def parse_record(content: bytes, model: type[M], file: Path, remedy: str) -> M:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = ": ".join([".".join(map(str, first["loc"])), first["msg"].lower()]).removeprefix(": ")
        raise UserError(f"{file} is damaged, or gradveil did not write it ({shorten(reason, 200)}); {remedy}.") from None
