"""Writing so that a reader never sees half a file: to a private temporary file beside it, flushed, then renamed."""

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gradveil.core.errors import UserError

LOCK = ".gradveil.lock"
_NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_TEMPORARY = re.compile(r"(\.gradveil-[0-9a-f]{8}-)[a-z0-9_]{8}\.part")  # no other program makes such names


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a temporary file and put it in `path`'s place, on disk for good."""
    with room_for(path):
        make_private(path.parent)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path.name), suffix=".part")
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, open to this user alone. Folders that exist stay as they are."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _prefix(name: str) -> str:
    """How the temporary files of one target begin. A hash, because the name itself may be as long as names can be."""
    return f".gradveil-{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}-"


def is_temporary(name: str, target: str | None = None) -> bool:
    """Whether `write_atomic` makes such names, for the file name `target` if one is given."""
    match = _TEMPORARY.fullmatch(name)
    return match is not None and (target is None or match[1] == _prefix(target))


def contents(folder: Path) -> set[str]:
    """The names in a folder, without the lock and the temporary files."""
    return {path.name for path in folder.iterdir() if path.name != LOCK and not is_temporary(path.name)}


def remove_leftovers(folder: Path, target: str | None = None) -> None:
    """Remove the temporary files of writers that were killed, and nothing else. The caller holds the folder's lock."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if is_temporary(path.name, target) and path.is_file():
            path.unlink(missing_ok=True)


class DiskFull(UserError):
    """Nothing more can be written. What was finished before stays as it is."""


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Turn what a full disk raises into one clear line, and a place where nothing can be written too."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno in _NO_PLACE:
            raise UserError(f"{path}: cannot be written ({(error.strerror or str(error)).lower()}).") from None
        if not no_space(error):
            raise
        kept = "what is finished is kept, and the same command goes on from it"
        raise DiskFull(f"{path}: no space left on the disk; {kept}.") from None


def no_space(error: BaseException) -> bool:
    """Whether a full disk (or a quota) is the reason; safetensors says so in words only."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(f"os error {code}" in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def sync_folder(folder: Path) -> None:
    """Put a folder's names on disk: a renamed file is safe from a power cut only then."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def alone_in(folder: Path, activity: str) -> Iterator[None]:
    """Keep other processes from writing to a folder meanwhile; refuse where one does already."""
    lock = FileLock(folder / LOCK, timeout=0, mode=0o600)
    try:
        make_private(folder)
        lock.acquire()
    except Timeout:
        raise UserError(f"{folder}: another {activity} is writing there; wait for it, or choose another place.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot write there ({(getattr(error, 'strerror', None) or str(error)).lower()}).") from None
    try:
        remove_leftovers(folder)
        yield
    finally:
        lock.release()


def write_text(path: Path, text: str) -> None:
    # A lone surrogate in a class name is legal JSON but not UTF-8; a report is written nevertheless.
    write_bytes(path, text.encode("utf-8", errors="replace"))


def write_bytes(path: Path, content: bytes) -> None:
    write_atomic(path, lambda temporary: temporary.write_bytes(content))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    write_atomic(path, lambda p: save_file(plain, str(p), metadata=metadata))
