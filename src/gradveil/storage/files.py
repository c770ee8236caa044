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
from safetensors.torch import save
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.storage.reading import read_bytes, read_json

LOCK = ".gradveil.lock"
MAX_INDEXED = 1 << 32  # bytes of a file that an index lists
MAX_MARKED = 1 << 28  # bytes of a file in which a mark is looked for
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


def rename_to_new(source: Path, target: Path) -> None:
    """Rename a file or folder for good, and never over something that appeared there meanwhile."""
    try:
        if source.is_dir():
            os.rename(source, target)  # fails on all but an empty folder
        else:
            os.link(source, target)  # fails on everything; a rename would replace a file
            source.unlink()
    except OSError as error:
        if os.path.lexists(target):
            raise UserError(f"{target}: exists already; give another place, or remove it.") from None
        if source.is_dir() or no_space(error):
            raise
        os.rename(source, target)  # a disk without hard links
    sync_folder(target.parent)


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


def check_replaceable(file: Path, mark: str) -> None:
    """Refuse a file that is there already, unless it is empty, or has the mark that gradveil gives to files of its kind."""
    if not os.path.lexists(file):
        return
    try:
        ours = not file.is_symlink() and (not (content := read_bytes(file, MAX_MARKED)) or mark.encode() in content)
    except UserError:  # too large, or not a regular file
        ours = False
    if not ours:
        raise UserError(f"{file} is there already, and gradveil did not write it; remove it, or choose another name.")


def write_indexed(folder: Path, files: Mapping[str, bytes], index: str, facts: Mapping[str, object]) -> None:
    """Write files and an index (JSON) of them. A file that is there already is replaced only if the index lists its hash."""
    earlier = _listed(folder / index)
    for path in (folder / name for name in files):
        if os.path.lexists(path) and (path.is_symlink() or _sha256(read_bytes(path, MAX_INDEXED)) not in earlier):
            raise UserError(f"{path} is there already, and {index} does not list it; choose another folder.")
    hashes = {_sha256(content) for content in files.values()}
    # Before the files, with the old hashes too: a process that is killed here leaves files that are listed.
    write_json(folder / index, {**facts, "sha256": sorted(hashes | earlier)})
    for name, content in files.items():
        write_bytes(folder / name, content)
    write_json(folder / index, {**facts, "sha256": sorted(hashes)})


def _listed(index: Path) -> set[str]:
    """The hashes in an index that is there already."""
    if not os.path.lexists(index):
        return set()
    content = None if index.is_symlink() else read_json(index)
    hashes = content.get("sha256") if isinstance(content, dict) else None
    if not isinstance(hashes, list):
        raise UserError(f"{index} is there already, and gradveil did not write it; choose another folder.")
    return {text for text in hashes if isinstance(text, str)}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    # As bytes: given a path, safetensors writes to a temporary file of its own, which a kill would leave behind.
    write_bytes(path, save(plain, metadata=metadata))
