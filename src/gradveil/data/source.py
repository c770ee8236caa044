"""The meaning of a data source: a name, a path, `torchvision:NAME`, `pkg.mod:factory` or an object; and its settings."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gradveil.core.errors import UserError, one_line, unknown
from gradveil.core.settings import build, load_object, parse_settings
from gradveil.data.catalogue import NAMED_SETS, NamedSet
from gradveil.data.raw import Options, Raw
from gradveil.data.readers import read_folder
from gradveil.data.readers.npz import read_npz
from gradveil.data.readers.objects import read_object
from gradveil.data.readers.vision import read_torchvision
from gradveil.storage.data_folder import FOLDER

# The settings begin at the first colon that a `key=` follows, so a path or an import may hold other colons.
_SETTINGS = re.compile(r":(?=\s*[A-Za-z][\w-]*\s*=)")
_IMPORT = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")
_EXPECTED = "idx files, an .npz file, or one sub-folder of pictures per class"


@dataclass(frozen=True)
class Source:
    """A source that has not been read yet. `named` is set where the source is a named data set."""

    name: str
    read: Callable[[Options], Raw]
    options: Options
    named: NamedSet | None = None


def resolve(source: object) -> Source:
    """What a source means. Files are opened by `Source.read`, not here."""
    if isinstance(source, Path):
        return Source(str(source), lambda options: _read_path(source, options), Options())
    if not isinstance(source, str):
        name = "(x, y)" if isinstance(source, (tuple, list)) else type(source).__name__
        return Source(name, lambda options: read_object(_product(source, name), name), Options())

    text = source.strip()
    base, *settings = _SETTINGS.split(text, maxsplit=1)
    head, _, tail = base.partition(":")
    if named := NAMED_SETS.get(head):
        return Source(text, named.read, _options(tail or "".join(settings), text), named)
    options = _options("".join(settings), text)
    if head == "torchvision":
        return Source(text, lambda _: read_torchvision(tail, Path(os.environ.get(FOLDER) or "data")), options)
    path = Path(base).expanduser()
    if base and os.path.lexists(path):
        return Source(text, lambda options: _read_path(path, options), options)
    if _IMPORT.fullmatch(base):
        return Source(text, lambda _: read_object(_product(load_object(base, kind="data"), base), base), options)
    if re.search(r"[\\/~.]", base):
        raise UserError(f"{base}: no such file or folder.")
    raise unknown("data set", head, NAMED_SETS, hint="`gradveil list data` shows all.")


def _options(settings: str, text: str) -> Options:
    return build(Options, parse_settings(settings, of=text), of=text)


def _read_path(path: Path, options: Options) -> Raw:
    if path.is_dir():
        return read_folder(path, options, expected=_EXPECTED)
    if path.suffix.lower() != ".npz":
        raise UserError(f"{path}: not an .npz file; give one, or a folder with {_EXPECTED}.")
    return read_npz(path)


def _product(source: object, name: str) -> object:
    """What a factory returns; any other object as it is."""
    if not callable(source):
        return source
    try:
        return source()
    except Exception as error:  # code of the user may raise anything; the text is passed on
        raise UserError(f"{name} raised {type(error).__name__}: {one_line(error)}") from None
