"""Reading files that others wrote: regular files only, and limits on bytes, depth, counts and lengths.

Every limit is checked before memory is taken for the content, and opening never waits. What does not fit raises one line.
"""

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
import yaml

from gradveil.core.errors import UserError, one_line, shown
from gradveil.core.text import shorten

MAX_TEXT = 1 << 20  # bytes of a file that people write
MAX_JSON = 1 << 24  # bytes of a file that gradveil writes
MAX_DEPTH = 64  # of lists and mappings inside each other
MAX_ITEMS = 500_000  # of JSON in all
MAX_NODES = 20_000  # of YAML in all, after aliases have been replaced by what they stand for
_PIECE = 1 << 20  # bytes that are read at once
MAX_DIGITS = 40  # of a number; a float has at most 17 that count

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)  # an open one reaches to the end: never tried again
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


@contextmanager
def open_regular(path: Path, limit: int) -> Iterator[BufferedReader]:
    """A regular file of at most `limit` bytes, open for reading. A link to one is followed."""
    try:
        _check_regular(path, os.stat(path), limit)  # first: opening a device may already have an effect
        handle = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise unreadable(path, error) from None
    try:
        _check_regular(path, os.fstat(handle), limit)  # again: it may be another file by now
        file = os.fdopen(handle, "rb", closefd=False)
        with file:
            yield file
    except OSError as error:  # files that the system makes up can fail when they are read
        if error.errno is None:  # of a format, not of the system
            raise
        raise unreadable(path, error) from None
    finally:
        os.close(handle)


def _check_regular(path: Path, status: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise UserError(f"{shown_path(path)}: {kind}, not a regular file; give a file.")
    if status.st_size > limit:
        raise UserError(f"{shown_path(path)}: {status.st_size:,} bytes; at most {limit:,} are read.")


def shown_path(path: Path | str) -> str:
    """A path for a message, shortened where it is longer than any real one."""
    text = str(path)
    return text if len(text) <= 500 else shown(text)


def unreadable(path: Path | str, error: OSError | ValueError) -> UserError:
    """One line for a file that the system does not open or read."""
    reason = getattr(error, "strerror", None) or one_line(error)
    return UserError(f"{shown_path(path)}: {reason[:1].lower()}{reason[1:]}.")


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_up_to(file: Readable, size: int) -> bytearray:
    """At most `size` bytes. Memory is taken as they arrive, not as a header claims them."""
    content = bytearray()
    while piece := file.read(min(_PIECE, size - len(content))):
        content += piece
    return content


def read_bytes(path: Path, limit: int = MAX_TEXT) -> bytes:
    """All bytes of a regular file; a file that changes its size meanwhile is refused."""
    with open_regular(path, limit) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            content = file.read(size + 1)
        except OSError as error:
            raise unreadable(path, error) from None
    if content is None or len(content) != size:
        raise UserError(f"{path}: its size changes while it is read; give a file that nobody writes to.")
    return content


def read_text(path: Path, limit: int = MAX_TEXT) -> str:
    """The text of a regular UTF-8 file."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({one_line(error)}).") from None


# -- JSON --------------------------------------------------------------------------------------------------------------


def check_json(content: bytes, where: Path | str, limit: int = MAX_JSON) -> None:
    """Refuse JSON that is too long, too deep, or holds too many items or too long numbers, without parsing it."""
    structure = _STRING.sub(b'""', content) if len(content) <= limit else b""
    depth = _STEPS[np.frombuffer(structure, dtype=np.uint8)].cumsum(dtype=np.int32).max(initial=0)
    excess = {
        f"more than {limit:,} bytes": len(content) > limit,
        f"nested deeper than {MAX_DEPTH}": depth > MAX_DEPTH,
        f"more than {MAX_ITEMS:,} items": sum(map(structure.count, (b",", b"[", b"{"))) > MAX_ITEMS,
        f"a number of more than {MAX_DIGITS} digits": _LONG_NUMBER.search(structure) is not None,
    }
    if reason := next((words for words, holds in excess.items() if holds), None):
        raise UserError(f"{shown_path(where)}: not JSON that is read here ({reason}).")


def parse_json(content: bytes | str, where: Path | str, limit: int = MAX_JSON) -> object:
    """A JSON value within the limits: keys occur once, numbers are finite."""
    content = content.encode("utf-8", errors="surrogatepass") if isinstance(content, str) else content
    check_json(content, where, limit)
    try:
        value: object = json.loads(
            content.decode("utf-8"), parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_distinct
        )
        return value
    except (ValueError, RecursionError) as error:
        raise UserError(f"{shown_path(where)}: not JSON ({one_line(error)}).") from None


def read_json(path: Path, limit: int = MAX_JSON) -> object:
    return parse_json(read_bytes(path, limit), path, limit)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(shown(text))


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key occurs twice")
    return mapping


# -- YAML --------------------------------------------------------------------------------------------------------------


class _BoundedLoader(yaml.SafeLoader):
    """Plain values only. Counts nodes and depth as they are after aliases have been replaced."""

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # finished nodes: nodes below, and levels

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._check(1, 0)
        repeated = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if node is None:
            return None
        if repeated and node not in self._sizes:
            raise yaml.YAMLError("it contains itself")
        if not repeated:
            sizes = [self._sizes[child] for child in _children(node)]
            self._sizes[node] = 1 + sum(n for n, _ in sizes), 1 + max((level for _, level in sizes), default=0)
        self._check(*self._sizes[node])
        self._depth -= 1
        return node

    def _check(self, nodes: int, levels: int) -> None:
        if self._depth + levels > MAX_DEPTH + 1:
            raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH}")
        if nodes > MAX_NODES or len(self._sizes) > MAX_NODES:
            raise yaml.YAMLError(f"more than {MAX_NODES:,} values, repeated ones included")


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if node.tag != "tag:yaml.org,2002:str" and len(node.value) > MAX_DIGITS:
        raise yaml.YAMLError(f"a number or date of more than {MAX_DIGITS} characters")
    return []


def parse_yaml(text: str, where: Path | str) -> object:
    """A YAML value within the limits."""
    try:
        loader = _BoundedLoader(text)
        try:
            value: object = loader.get_single_data()
            return value
        finally:
            loader.dispose()
    # The constructors of PyYAML raise the last three on values with a wrong tag: `!!timestamp x`, `!!bool x`, `!!int ""`.
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, AttributeError, LookupError, TypeError) as error:
        raise UserError(f"{shown_path(where)}: not YAML ({shorten(one_line(error), 300)}).") from None


def read_yaml(path: Path, limit: int = MAX_TEXT) -> object:
    return parse_yaml(read_text(path, limit), path)
