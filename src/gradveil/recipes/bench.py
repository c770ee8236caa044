"""Where a measurement is taken: in named pieces, each stored as soon as it is done, so that a stopped run resumes."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, cast

from pydantic import Field, JsonValue

from gradveil.auditing.progress import Display
from gradveil.core.results import Record
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import StoredCell, read_record

T = TypeVar("T")
R = TypeVar("R")


class Piece(StoredCell):
    """One piece of a measurement, as displays show it."""

    kind: str = "measure"
    defense: str = ""
    attack: str = ""
    tensors_sha256: None = None

    def __str__(self) -> str:
        return self.key


class FinishedPieces(Record):
    """The results of finished pieces by name, and the seconds that they took."""

    seconds: float = 0.0
    pieces: dict[str, JsonValue] = Field(default_factory=dict)


class Bench:
    """Does the pieces of one measurement, shows them, and keeps their results in a file."""

    def __init__(self, file: Path, cache: Path, display: Callable[[], Display]):
        stored = read_record(file, FinishedPieces, "delete it") if file.is_file() else FinishedPieces()
        self.cache = cache  # a folder for what is trained once
        self.results, self.seconds = dict(stored.pieces), stored.seconds
        self.total = 1  # pieces; before they are listed, the preparation
        self._file, self._display = file, display
        self._preparation: Display | None = None

    def progress(self, text: str, done: int, total: int, /) -> None:
        """Show long work that comes before the pieces."""
        piece = Piece(key=text)
        if self._preparation is None:
            self._preparation = self._display()
            self._preparation.start(1, {text: 1.0})
            self._preparation.begin(piece)
        self._preparation.progress(piece, done, total)

    def each(self, pieces: Mapping[str, T], work: Callable[[T], R], /) -> dict[str, R]:
        """The result of `work` for every piece. Results are JSON; one that is stored is not computed again."""
        self.stop()
        display, self.total = self._display(), len(pieces)
        display.start(self.total, dict.fromkeys(pieces.keys() - self.results.keys(), 1.0))
        try:
            for name, item in pieces.items():
                if name not in self.results:
                    piece, began = Piece(key=name), time.perf_counter()
                    display.begin(piece)
                    self.results[name] = cast("JsonValue", work(item))
                    seconds = time.perf_counter() - began
                    self.seconds += seconds
                    write_json(self._file, {"seconds": self.seconds, "pieces": self.results})
                    display.end(piece, piece.model_copy(update={"seconds": seconds}))
        finally:
            display.stop()
        return {name: cast("R", self.results[name]) for name in pieces}

    def stop(self) -> None:
        """End the display of the preparation."""
        if self._preparation is not None:
            self._preparation.stop()
