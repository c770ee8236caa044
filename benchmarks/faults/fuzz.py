"""Bad input, thoroughly: every reader of the tool on thousands of spoilt inputs, each bounded in time.

    python benchmarks/faults/fuzz.py --inputs 1500 --seed 0

An input must end in a result or in one clear line (`UserError`), within a few seconds, and leave no unfinished file.
Anything else is a fault, printed with the number that makes it again (`--only READER --first N --inputs 1`). The counts
go to docs/results/reliability.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import yaml
from damage import HUGE, TEXTS, damaged, safetensors, text, value
from fuzz_models import make
from PIL import Image
from record import record

import gradveil as gv
from gradveil import attacks, defenses, models
from gradveil.audit.condition import Condition
from gradveil.audit.spec import AuditSpec, read_spec
from gradveil.cli import one_line
from gradveil.data import load
from gradveil.errors import UserError
from gradveil.federation import train
from gradveil.federation.partition import share

SECONDS = 60  # until an input counts as a hang
SHAPE, CLASSES = (1, 6, 6), 3
Random = random.Random
Job = Callable[[], object]


# -- the method grammar -------------------------------------------------------------------------------------------------


def grammar(rng: Random, folder: Path) -> Job:
    kinds: list[tuple[list[str], Callable[[str], object]]] = [
        (defenses.registry.names(), defenses.parse),
        (attacks.registry.names(), attacks.parse),
        (models.MODELS.names(), models.MODELS.parse),
        (["mnist-5k", "mnist", "cifar10", "torchvision", str(folder)], load),
        (["worst.ssim.max > 0.6", "spec != 'none' and worst.asr > 0.1", "not (worst.psnr.mean >= 20)"], Condition),
        (["iid", "dirichlet:alpha=0.5", "classes:per_client=2"], lambda s: share(torch.arange(30) % 3, 3, s, 0)),
    ]
    names, parse = rng.choice(kinds)
    name = rng.choice(names)
    written = name
    for _ in range(rng.randrange(4)):
        key = rng.choice(
            ["ratio", "std", "steps", "policy", "restarts", "norm", "size", "private", "alpha", text(rng, 6)]
        )
        given = rng.choice([str(rng.choice(HUGE)), "0.5", "-1", "nan", "inf", "1e400", "3-1-7+43-18-18", *TEXTS])
        written += (":" if ":" not in written else ",") + f"{key}={given}"
    if rng.random() < 0.3:
        written += "+" + rng.choice(names)
    if rng.random() < 0.4:
        written = damaged(rng, written.encode("utf-8", "replace")).decode("utf-8", "replace")
    if rng.random() < 0.1:
        written = text(rng, 40)
    return lambda: parse(written)


# -- YAML ---------------------------------------------------------------------------------------------------------------

_KEYS = ("data", "model", "defenses", "attacks", "victims", "batch_size", "seed", "budget", "utility")
BOMB = f"{_KEYS[0]}: &data [x,x,x,x,x,x,x,x]\n" + "".join(
    f"{key}: &{key} [{','.join([f'*{before}'] * 8)}]\n" for before, key in itertools.pairwise(_KEYS)
)  # a few lines that unfold to 134 million words


def config(rng: Random, folder: Path) -> Job:
    spec = {
        "data": "mnist-5k",
        "model": "lenet",
        "defenses": ["prune:ratio=0.9"],
        "attacks": ["ig:steps=5"],
        "victims": 2,
    }
    for _ in range(rng.randrange(4)):
        key = rng.choice([*AuditSpec.model_fields, "out", text(rng, 10)])
        spec[key] = value(rng)  # type: ignore[assignment]
    with contextlib.suppress(yaml.YAMLError):
        written = yaml.safe_dump(spec, allow_unicode=rng.random() < 0.5)
    content = written.encode("utf-8", "surrogatepass")
    kind = rng.random()
    if kind < 0.4:
        content = damaged(rng, content)
    elif kind < 0.45:
        content = rng.choice(
            [BOMB, "- " * 3000, "[" * 3000, "{" * 500, "!!python/object/apply:os.getcwd []", "&a [*a]"]
        ).encode()
    elif kind < 0.5:
        content = rng.randbytes(rng.randrange(200))
    file = folder / "audit.yaml"
    file.write_bytes(content)
    return lambda: read_spec(file)


# -- data -----------------------------------------------------------------------------------------------------------------


def npz(rng: Random, folder: Path) -> Job:
    draw = np.random.default_rng(rng.randrange(2**32))
    shape = rng.choice(
        [(12, 6, 6)] * 6 + [(12, 6, 6, 1), (12, 6, 6, 3), (12, 3, 6, 6), (12, 36), (0, 6, 6), (12, 0, 6), (3, 6, 6)]
    )
    kind = rng.choice(["u1"] * 6 + ["f4"] * 6 + ["f8", "f2", "i8", "c8", "U3", "S2", "?", "M8[s]", "O"])
    images = (
        draw.integers(0, 2, shape).astype(kind) if kind not in ("f4", "f8", "f2") else draw.random(shape).astype(kind)
    )
    if kind.startswith("f") and images.size and rng.random() < 0.3:
        images.flat[0] = rng.choice([np.nan, np.inf, -1.0, 255.0])
    labels = (np.arange(len(images)) % 3).astype(rng.choice(["i8"] * 6 + ["u1", "u8", "f4", "?", "U1"]))
    if rng.random() < 0.2 and labels.dtype.kind in "iu" and len(labels):
        labels[0] = rng.choice([2**31, 255, 100]) if labels.dtype.itemsize == 8 else 200
    arrays = {"images": images, "labels": labels}
    if rng.random() < 0.3:
        arrays[rng.choice(["class_names", "train_images", "labels ", "../x", text(rng, 5)])] = draw.random(3)
    if rng.random() < 0.1:
        arrays.pop(rng.choice(list(arrays)))
    buffer = io.BytesIO()
    (np.savez if rng.random() < 0.5 else np.savez_compressed)(buffer, **arrays)  # type: ignore[arg-type]
    content = buffer.getvalue()
    if rng.random() < 0.25:  # a member whose own header lies
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
            for name, array in arrays.items():
                member = io.BytesIO()
                np.save(member, array)
                archive.writestr(f"{name}.npy".replace("\0", "0"), damaged(rng, member.getvalue()))
        content = buffer.getvalue()
    elif rng.random() < 0.4:
        content = damaged(rng, content)
    file = folder / "data.npz"
    file.write_bytes(content)
    return lambda: load(str(file) + rng.choice(["", "", ":size=8", ":private=4", ":limit=11"]))


def idx(rng: Random, folder: Path) -> Job:
    import gzip
    import struct

    count = rng.choice([12, 12, 12, 3, 0])
    sizes = [rng.choice([6, 6, 6, *HUGE]) % 2**32 if rng.random() < 0.1 else n for n in (count, 6, 6)]
    images = bytes([0, 0, 8, 3]) + struct.pack(">3I", *sizes) + rng.randbytes(count * 36)
    labels = bytes([0, 0, 8, 1]) + struct.pack(">I", count) + bytes(i % 3 for i in range(count))
    packed = rng.random() < 0.3
    for name, content in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        if rng.random() < 0.5:
            content = damaged(rng, content)
        if packed:
            content = gzip.compress(content)
            content = damaged(rng, content) if rng.random() < 0.5 else content
        if rng.random() < 0.95:
            (folder / (name + ".gz" * packed)).write_bytes(content)
    return lambda: load(str(folder))


def picture(rng: Random) -> tuple[str, bytes]:
    ending = rng.choice(["png", "png", "png", "jpg", "bmp", "gif", "webp", "tif", "ppm"])
    mode = rng.choice(["L"] * 12 + ["RGB", "RGBA", "P", "1", "I", "F", "LA"])
    size = rng.choice([(6, 6)] * 60 + [(7, 5), (1, 1), (40, 3)])
    buffer = io.BytesIO()
    formats = {"jpg": "JPEG", "tif": "TIFF"}
    try:
        Image.frombytes("L", size, rng.randbytes(size[0] * size[1])).convert(mode).save(
            buffer, formats.get(ending, ending.upper())
        )
    except (OSError, KeyError, ValueError):  # not every format knows every mode
        ending, buffer = "png", io.BytesIO()
        Image.new("L", (6, 6)).save(buffer, "PNG")
    content = buffer.getvalue()
    return ending, damaged(rng, content) if rng.random() < 0.05 else content


def folder_of_pictures(rng: Random, folder: Path) -> Job:
    plain = rng.random() < 0.2
    root = folder / rng.choice(["", "", "train", "a/b"])
    for label in range(rng.choice([2, 2, 2, 3, 1])):
        below = root / rng.choice([f"class{label}", f"class{label}", f"\x1b[31m{label}", f" {label}", f".{label}"])
        below.mkdir(parents=True, exist_ok=True)
        for i in range(rng.choice([6, 7, 8, 7, 8, 0])):
            ending, content = ("png", PLAIN[i % len(PLAIN)]) if plain else picture(rng)
            (below / f"{i}.{ending}").write_bytes(content)
        if rng.random() < 0.1:
            odd = below / rng.choice(["notes.txt", "link.png", "dir.png", "gone.png"])
            if odd.name == "dir.png":
                odd.mkdir()
            elif odd.name == "gone.png":
                odd.symlink_to("nowhere.png")
            elif odd.name == "link.png":
                odd.symlink_to(below, target_is_directory=True)
            else:
                odd.write_text("hello")
    return lambda: load(str(folder) + rng.choice(["", "", ":size=8", ":limit=10"]))


def _plain(grey: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (6, 6), grey).save(buffer, "PNG")
    return buffer.getvalue()


PLAIN = [_plain(grey) for grey in range(0, 250, 20)]


# -- updates and checkpoints -------------------------------------------------------------------------------------------


def victim() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(36, 4), torch.nn.Sigmoid(), torch.nn.Linear(4, 3)
        )


DTYPES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "C64": 8,
    "X": 4,
}


def tensors_file(rng: Random, file: Path, meta: dict[str, object]) -> None:
    """The victim's tensors, with names, types, shapes, offsets and values that may lie."""
    header: dict[str, object] = {}
    body = b""
    for name, tensor in victim().state_dict().items():
        kind = "F32" if rng.random() < 0.85 else rng.choice(list(DTYPES))
        shape: list[object] = list(tensor.shape)
        if rng.random() < 0.08:
            shape = [rng.choice([*HUGE, -1, 1, 36, "4", None, 0.5]) for _ in range(rng.randrange(4))]
        if rng.random() < 0.08:
            name = rng.choice([name + "x", "", "é\0", "../../x", "1.weight", "__metadata__", text(rng, 6)])
        values = np.random.default_rng(rng.randrange(2**32)).normal(size=tensor.numel()).astype(np.float32)
        if rng.random() < 0.08:
            values[0] = rng.choice([np.nan, np.inf, 1e38, 0.0])
        raw = (values.tobytes() * 2)[: tensor.numel() * DTYPES[kind]]
        start: object = len(body)
        end: object = len(body) + len(raw)
        if rng.random() < 0.06:
            start, end = (rng.choice([*HUGE, 0, start, end]) for _ in range(2))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        body += raw
    if rng.random() < 0.7:
        header["__metadata__"] = {k: v if isinstance(v, str) else json.dumps(v) for k, v in meta.items()}
    elif rng.random() < 0.3:
        header["__metadata__"] = value(rng)
    content = safetensors(rng, header, body)
    if rng.random() < 0.1:  # a name twice
        content = content.replace(b'"1.bias"', b'"1.weight"')
    file.write_bytes(damaged(rng, content) if rng.random() < 0.4 else content)


def facts(rng: Random) -> dict[str, object]:
    told: dict[str, object] = {"gradveil": "update", "kind": "gradient", "examples": "1", "input_shape": list(SHAPE)}
    told |= {"num_classes": 3, "mean": [0.5], "std": [0.5]}
    for _ in range(rng.choice([0, 0, 1, 2])):
        key = rng.choice(
            ["kind", "examples", "input_shape", "num_classes", "mean", "std", "lr", "local_steps", text(rng, 6)]
        )
        told[key] = rng.choice([value(rng), rng.choice(["gradient", "delta"]), rng.choice(HUGE)])
    return told


def update(rng: Random, folder: Path) -> Job:
    file = folder / "update.safetensors"
    tensors_file(rng, file, facts(rng))
    given = {"input_shape": SHAPE} if rng.random() < 0.3 else {}
    given |= {"labels": [rng.choice([0, 1, 2, 3, -1])]} if rng.random() < 0.1 else {}  # type: ignore[dict-item]

    def job() -> object:
        found = gv.attack(update=file, model=victim(), attacks=["linear", "ig:steps=2"], budget="quick", **given)
        return found.save(folder / "out")

    return job


def checkpoint(rng: Random, folder: Path) -> Job:
    if rng.random() < 0.35:
        return training_state(rng, folder)
    before, after = folder / "before.safetensors", folder / "after.safetensors"
    for file in (before, after):
        tensors_file(rng, file, {})
    more = {"lr": rng.choice([0.1, 0.0, -1.0, float("nan"), 1e300])} if rng.random() < 0.9 else {}

    def job() -> object:
        found = gv.attack(
            before=before, after=after, model=victim(), input_shape=SHAPE, attacks=["linear", "ig:steps=2"], **more
        )
        return found.save(folder / "out")

    return job


def training_state(rng: Random, folder: Path) -> Job:
    """The folder of a training run that goes on: its state may be damaged."""
    run = folder / "run"
    shutil.copytree(_trained(), run)
    for file in run.iterdir():
        if file.is_file() and rng.random() < 0.7:
            file.write_bytes(damaged(rng, file.read_bytes()))
    return lambda: train(victim(), DATA, "none", rounds=2, clients=2, images_per_client=12, folder=run)


_TRAINED: list[Path] = []


def _trained() -> Path:
    if not _TRAINED:
        folder = Path(tempfile.mkdtemp(prefix="gradveil-fuzz-")) / "run"
        train(victim(), DATA, "none", rounds=1, clients=2, images_per_client=12, folder=folder)
        state = folder / "state.safetensors"
        content = state.read_bytes().replace(b'\\"rounds\\": 1', b'\\"rounds\\": 2')
        assert len(content) == state.stat().st_size
        state.write_bytes(content)  # so that a second round is still to be done
        _TRAINED.append(folder)
    return _TRAINED[0]


def model(rng: Random, folder: Path) -> Job:
    name, module = make(rng, SHAPE, CLASSES)
    chosen = rng.choice(["ig:steps=2", "linear", "dlg:steps=2", "rgap"])
    defense = rng.choice(["none", "prune:ratio=0.5", "soteria", "precode", "dpsgd"])

    def job() -> object:
        report = gv.audit(
            DATA,
            module,
            [defense],
            [chosen],
            victims=1,
            quiet=True,
            out=folder / "out",
            batch_size=rng.choice([1, 1, 2]),
        )
        problems = [a["error"] for d in report.summary["defenses"] for a in d["attacks"] if a["error"]]
        assert all(len(p.splitlines()) == 1 for p in problems), f"{name}: {problems}"
        return report

    return job


def _data() -> object:
    draw = torch.Generator().manual_seed(0)
    return load((torch.rand(60, *SHAPE, generator=draw), torch.arange(60) % CLASSES))


DATA = _data()
READERS: dict[str, Callable[[Random, Path], Job]] = {
    "method grammar": grammar,
    "YAML configs": config,
    "npz archives": npz,
    "image folders": folder_of_pictures,
    "idx files": idx,
    "safetensors updates": update,
    "checkpoints": checkpoint,
    "models": model,
}


# -- the campaign ---------------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """The alarm rang."""


@contextlib.contextmanager
def alarm(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(reader: str, seed: int, number: int, folder: Path) -> tuple[str, str]:
    """What becomes of one input: `result`, `refused` or a fault, and its text."""
    rng = random.Random(f"{seed}/{reader}/{number}")
    job = READERS[reader](rng, folder)
    try:
        with alarm(SECONDS), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job()
        kind, said = "result", ""
    except UserError as error:
        kind, said = "refused", one_line(str(error))
        if not said.isprintable() or not said:
            kind = "unclear"
    except Hang:
        kind, said = "hang", f"more than {SECONDS} s"
    except BaseException:
        kind, said = "traceback", traceback.format_exc()
    left = [p.name for p in folder.rglob(".*") if not p.name.startswith((".lock", ".0", ".1", ".2"))]
    if kind in ("result", "refused") and left:
        kind, said = "half-written file", ", ".join(left)
    return kind, said


def campaign(readers: list[str], seed: int, first: int, inputs: int, verbose: bool) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for reader in readers:
        counts[reader], begun = Counter(), time.perf_counter()
        for number in range(first, first + inputs):
            with tempfile.TemporaryDirectory(prefix="gradveil-fuzz-") as folder:
                kind, said = outcome(reader, seed, number, Path(folder))
            counts[reader][kind] += 1
            if kind not in ("result", "refused"):
                print(f"--- {reader} {number}: {kind}\n{said}", file=sys.stderr, flush=True)
            elif verbose:
                print(f"{reader} {number}: {kind} {said}")
        print(f"{reader}: {dict(counts[reader])} in {time.perf_counter() - begun:.0f} s", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1500, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", choices=sorted(READERS), help="one reader alone; nothing is recorded")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gv.audit(
        DATA, victim(), "none", "ig:steps=1", victims=1, quiet=True
    )  # all imports done, so that no alarm rings in one
    os.environ.setdefault("COLUMNS", "200")
    begun = time.perf_counter()
    readers = [options.only] if options.only else list(READERS)
    counts = campaign(readers, options.seed, options.first, options.inputs, options.verbose)
    faults = sum(n for c in counts.values() for kind, n in c.items() if kind not in ("result", "refused"))
    if not options.only:
        rows = [
            "| reader | inputs | results | refused in one line | tracebacks | hangs | other faults |",
            "|---|---|---|---|---|---|---|",
        ]
        for reader, c in counts.items():
            other = sum(n for kind, n in c.items() if kind not in ("result", "refused", "traceback", "hang"))
            rows.append(
                f"| {reader} | {c.total()} | {c['result']} | {c['refused']} | {c['traceback']} | {c['hang']} | {other} |"
            )
        total = sum(c.total() for c in counts.values())
        about = (
            f"{total} inputs, {options.inputs} a reader, seed {options.seed}, numbered from {options.first} on; "
            f"a hang is more than {SECONDS} s. {time.perf_counter() - begun:.0f} s in all."
        )
        record("Bad input", "fuzz.py", [about, "", *rows])
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
