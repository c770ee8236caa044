"""What a data source means: a known name, a path, `torchvision:NAME`, `pkg.mod:factory` or an object; its settings."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gradveil.core.errors import UserError, unknown
from gradveil.core.settings import build, load_object, parse_settings
from gradveil.data.catalogue import FOLDER, KNOWN, Known
from gradveil.data.raw import Options, Raw, one_line
from gradveil.data.readers import read_folder
from gradveil.data.readers.npz import read_npz
from gradveil.data.readers.objects import read_object
from gradveil.data.readers.vision import read_torchvision

# The settings begin at the first colon that a `key=` follows, so other colons may stand in a path or an import.
_SETTINGS = re.compile(r":(?=\s*[A-Za-z][\w-]*\s*=)")
_IMPORT = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")
_EXPECTED = "idx files, an .npz file, or one sub-folder of pictures for each class"


@dataclass(frozen=True)
class Source:
    name: str
    read: Callable[[Options], Raw]
    options: Options
    known: Known | None = None


def resolve(source: object) -> Source:
    if isinstance(source, Path):
        return Source(str(source), lambda options: _read_path(source, options), Options())
    if not isinstance(source, str):
        name = "(x, y)" if isinstance(source, (tuple, list)) else type(source).__name__
        return Source(name, lambda options: read_object(_called(source, name), name), Options())

    text = source.strip()
    base, *given = _SETTINGS.split(text, maxsplit=1)
    head, _, tail = base.partition(":")
    if head in KNOWN:
        known = KNOWN[head]
        return Source(text, known.read, _options(tail or "".join(given), text), known)
    options = _options("".join(given), text)
    if head == "torchvision":
        return Source(text, lambda _: read_torchvision(tail, Path(os.environ.get(FOLDER) or "data")), options)
    path = Path(base).expanduser()
    if base and path.exists():
        return Source(text, lambda options: _read_path(path, options), options)
    if _IMPORT.fullmatch(base):
        return Source(text, lambda _: read_object(_called(load_object(base, kind="data"), base), base), options)
    if re.search(r"[\\/~.]", base):
        raise UserError(f"{base}: no such file or folder.")
    raise unknown("data set", head, KNOWN, hint="`gradveil list data` shows all.")


def _options(given: str, text: str) -> Options:
    return build(Options, parse_settings(given, of=text), of=text)


def _read_path(path: Path, options: Options) -> Raw:
    if path.is_dir():
        return read_folder(path, options, expected=_EXPECTED)
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder.")
    if path.suffix.lower() != ".npz":
        raise UserError(f"{path}: not an .npz file; give one, or a folder with {_EXPECTED}.")
    return read_npz(path)


def _called(made: object, name: str) -> object:
    """A factory's product, or the object itself."""
    if not callable(made):
        return made
    try:
        return made()
    except Exception as error:  # the user's own code: whatever it raises is the message
        raise UserError(f"{name} raised {type(error).__name__}: {one_line(error)}") from None
