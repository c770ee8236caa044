"""Run folders from strangers, and special files in the place of every file that is read."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from damage import SHAPE, Job, Random, damaged, text, value
from fuzz_data import PLAIN
from fuzz_updates import DATA, victim

import gradveil as gv
from gradveil.api import compare
from gradveil.data import load
from gradveil.report import write_report
from gradveil.storage.reading import read_yaml
from gradveil.summary import Summary

LONG = 10**5  # characters of a name, levels of nesting, members of a list: more than any real file has
DIGITS = "@digits"  # stands for a number of 5,000 digits
_RUNS: list[Path] = []


def finished_run() -> Path:
    """A small audit, done once and copied by every input."""
    if not _RUNS:
        folder = Path(tempfile.mkdtemp(prefix="gradveil-fuzz-")) / "run"
        _audit(folder)
        _RUNS.append(folder)
    return _RUNS[0]


def _audit(folder: Path) -> object:
    return gv.audit(DATA, victim(), ["none", "prune:ratio=0.5"], "linear", victims=2, quiet=True, workers=0, out=folder)


def run_folder(rng: Random, folder: Path) -> Job:
    """A finished run with one to four of its files changed; it is reported, compared, read or continued."""
    run = folder / "run"
    shutil.copytree(finished_run(), run)
    files = [p for p in sorted(run.rglob("*")) if p.is_file()]
    for file in rng.sample(files, min(len(files), rng.randrange(1, 5))):
        rng.choice((_damage, _damage, _damage, _edit, _edit, _edit, _swap, _special, _truncate, _bomb))(rng, file)
    todo = rng.randrange(5)
    if todo == 0:
        return lambda: write_report(run, rng.choice(("none", "blurred", "shown")))
    if todo == 1:
        return lambda: compare(run, finished_run())
    if todo == 2:
        return lambda: compare(finished_run(), run)
    if todo == 3:
        return lambda: Summary.read(run)
    return lambda: _audit(run)


def _damage(rng: Random, file: Path) -> None:
    file.write_bytes(damaged(rng, file.read_bytes()))


def _truncate(rng: Random, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content) + 1)])


def _swap(rng: Random, file: Path) -> None:
    other = rng.choice([p for p in sorted(file.parent.iterdir()) if p.is_file()])
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def _edit(rng: Random, file: Path) -> None:
    """JSON that is well formed, with values anywhere that no run would have; other files are damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return _damage(rng, file)
    edited = json.dumps(_edited(rng, content)).replace(f'"{DIGITS}"', "9" * 5000)
    file.write_text(edited, encoding="utf-8")


def _edited(rng: Random, content: object) -> object:
    if isinstance(content, dict) and content and rng.random() < 0.85:
        key = rng.choice(sorted(content))
        if rng.random() < 0.1:
            content.pop(key)
        elif rng.random() < 0.1:
            content[text(rng, 8)] = content.pop(key)
        else:
            content[key] = _edited(rng, content[key])
        return content
    if isinstance(content, list) and content and rng.random() < 0.85:
        place = rng.randrange(len(content))
        content[place] = _edited(rng, content[place])
        return content
    return rng.choice((value(rng), value(rng), DIGITS, -1, 1e308, "9" * 5000, "<script>x</script>", "../" * 40 + "etc/passwd"))


def _bomb(rng: Random, file: Path) -> None:
    """Content that grows when it is read."""
    file.write_text(
        rng.choice(
            (
                "[" * LONG + "]" * LONG,
                '{"a":' * LONG + "1" + "}" * LONG,
                "a: &a [x, x, x, x, x, x, x, x, x]\n"
                + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)),
                "[" + ",".join(["0"] * LONG) + "]",
                '{"' + "n" * LONG + '": 1}',
                '{"schema": ' + "9" * LONG + "}",
                "- " * LONG,
                "!!python/object/apply:os.system ['true']",
            )
        ),
        encoding="utf-8",
    )


def _special(rng: Random, file: Path) -> None:
    """Something that is no regular file, or leads somewhere else."""
    file.unlink()
    kind = rng.randrange(8)
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.symlink_to("/dev/zero")
    elif kind == 2:
        file.symlink_to(file.name)  # a loop
    elif kind == 3:
        file.mkdir()
    elif kind == 4:
        file.symlink_to("/proc/self/mem")
    elif kind == 5:
        with file.open("wb") as sparse:
            sparse.truncate(rng.choice((2**33, 2**40)))
    elif kind == 6:
        _socket(file)
    else:
        file.symlink_to("/dev/tty" if rng.random() < 0.5 else "nowhere")


def _socket(file: Path) -> None:
    """A socket on the disk; its path must be short, hence the change of folder."""
    before = Path.cwd()
    os.chdir(file.parent)
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(file.name[:90])
    finally:
        os.chdir(before)


def special_file(rng: Random, folder: Path) -> Job:
    """A special file in the place of data, of an update, of a checkpoint, of a policy or of a configuration."""
    name, read = rng.choice(_PLACES)
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".png"):  # among real pictures
        for i in range(6):
            (file.parent / f"{i}.png").write_bytes(PLAIN[i])
    file.write_bytes(b"")
    _special(rng, file)
    return lambda: read(file)


def _attack(file: Path) -> object:
    return gv.attack_update(file, model=victim(), input_shape=SHAPE, attacks=["linear"])


def _difference(file: Path) -> object:
    return gv.attack_update(before=file, after=file, model=victim(), input_shape=SHAPE, attacks=["linear"], lr=0.1)


_PLACES: list[tuple[str, Callable[[Path], object]]] = [
    ("x.npz", lambda file: load(str(file))),
    ("x.png", lambda file: load(str(file))),
    ("pictures/a/a.png", lambda file: load(str(file.parent.parent))),
    ("pictures/a/z.jpg", lambda file: load(str(file.parent.parent))),
    ("idx/train-images-idx3-ubyte", lambda file: load(str(file.parent))),
    ("idx/train-images-idx3-ubyte.gz", lambda file: load(str(file.parent))),
    ("cifar/data_batch_1.bin", lambda file: load(str(file.parent))),
    ("update.safetensors", _attack),
    ("state.safetensors", _difference),
    ("state.pt", _difference),
    ("policy.json", lambda file: gv.audit(DATA, victim(), f"ats:policy={file}", "linear", victims=1, quiet=True)),
    ("audit.yaml", read_yaml),
    ("run/summary.json", lambda file: Summary.read(file.parent)),
]
