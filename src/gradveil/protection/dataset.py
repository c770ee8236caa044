"""A protected copy of an image data set: a folder of pictures by class, or an .npz archive.

Images are protected batch by batch. Finished batches are kept in a hidden folder beside the copy, so that a killed run
resumes where it stopped, and the copy itself appears whole at the end or not at all. The secret that all draws of a run
come from is stored in that folder too, and is removed with it.
"""

import hashlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from gradveil.core.errors import UserError, shape_text
from gradveil.core.gradients import ModelFunction
from gradveil.core.hashing import digest
from gradveil.core.progress import Progress
from gradveil.core.randomness import Streams
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors
from gradveil.data import load
from gradveil.data.raw import Array, Images
from gradveil.data.readers.image_folder import by_class, decode, subfolders
from gradveil.data.readers.npz import read_npz
from gradveil.data.resize import resize_square
from gradveil.data.validation import to_batch
from gradveil.defenses import Defense, Setup, Step, parse
from gradveil.storage.files import LOCK, DiskFull, alone_in, contents, rename_to_new, room_for, write_json, write_tensors
from gradveil.storage.reading import read_json
from gradveil.storage.tensor_file import read_tensors

BATCH = 128
MARKER = ".gradveil-protect.json"  # says that a folder of unfinished work is ours, and of which run
SOFT = ("mixup", "instahide")  # batch-stage defenses that need no model: they encode images, and soften labels
LOSSLESS = {".png", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"}  # JPEG would undo what a defense put into the pixels


@dataclass(frozen=True)
class Originals:
    """The images to protect, with the names of their classes and files."""

    batch: Batch
    class_names: tuple[str, ...] | None
    files: tuple[Path, ...] | None  # of a folder, relative to it
    floats: bool  # whether pixels were given as floats

    @property
    def classes(self) -> int:
        return len(self.class_names) if self.class_names else int(self.batch.y.max()) + 1


@dataclass(frozen=True)
class Copy:
    """What was written."""

    path: Path
    original: Batch
    protected: Batch


def protect_files(
    source: Path,
    target: Path,
    defense: str | Defense,
    *,
    public: str | None = None,
    size: int | None = None,
    reproducible: int | None = None,
    progress: Progress | None = None,
) -> Copy:
    """Write a copy of `source` in which every image went through `defense`. `public` names images that anybody has.

    `reproducible` is a seed in place of the operating system's randomness: everyone who knows it can undo the protection.
    """
    method = parse(defense)
    soft = _check_stages(method)
    originals = _read(source, size)
    others = _public(public, originals.batch.x) if public else None
    mean, std = _normalisation(others, originals.batch.x.shape[1])
    work = WorkFolder(target.parent / f".{target.name}.unfinished", _key(method, originals, others, reproducible))
    work.check()
    # A run that was killed after the copy was put in place has only its work folder left to remove.
    if not (os.path.lexists(target) and work.secret()):
        _check_target(source, target, originals, soft)
    with room_for(target), alone_in(work.path, "protect"):
        secret = work.begin()
        streams = Streams(secret, fresh=False) if reproducible is None else Streams.of_seed(reproducible)
        job = ProtectionJob(work.path, others, originals.classes, mean, std, streams, progress)
        protected = originals.batch
        try:
            for place, part in enumerate(method.parts):  # each on the result of the one before
                protected = job.apply(part, place, protected)
        except DiskFull:
            raise
        except UserError:  # there is nothing to resume from
            work.remove()
            raise
        if not os.path.lexists(target):
            if originals.files is None or soft:
                copy = _write_npz(work.path, originals, protected, {"mean": mean, "std": std} if soft else {})
            else:
                copy = _write_folder(work.path, originals.files, protected)
            try:
                rename_to_new(copy, target)
            except UserError:  # what is there now is not this copy
                work.remove()
                raise
        work.remove()
    return Copy(target, originals.batch, protected)


@dataclass(frozen=True)
class WorkFolder:
    """The hidden folder of unfinished work. A folder without our marker is the user's and is never touched."""

    path: Path
    key: str  # of the run

    def check(self) -> None:
        """Refuse a folder that holds anything but our work."""
        if not self.path.exists():
            return
        if not self.path.is_dir() or self.path.is_symlink():
            raise UserError(f"{self.path}: unfinished work is kept there, but it is not a folder; move it away.")
        names = contents(self.path)
        if names and MARKER not in names:
            raise UserError(f"{self.path}: holds files that are not gradveil's; move it away, or choose another DST.")

    def secret(self) -> bytes | None:
        """The stored secret, if the unfinished work is of this run."""
        try:
            marker = read_json(self.path / MARKER)
            return bytes.fromhex(marker["secret"]) if isinstance(marker, dict) and marker["key"] == self.key else None
        except (UserError, ValueError, KeyError, TypeError):  # none, or damaged: begin anew
            return None

    def begin(self) -> bytes:
        """The secret of the run: the stored one, or a new one. Finished batches of another run are removed."""
        if secret := self.secret():
            return secret
        self._empty()
        secret = secrets.token_bytes(32)
        write_json(self.path / MARKER, {"key": self.key, "secret": secret.hex()})  # mode 600, as every file
        return secret

    def remove(self) -> None:
        self._empty()  # the marker last: until then the folder is known as ours
        shutil.rmtree(self.path)

    def _empty(self) -> None:
        for path in self.path.iterdir():
            if path.name not in (LOCK, MARKER):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _check_stages(method: Defense) -> bool:
    """Whether labels become soft; refuses what cannot be done to images once and for all."""
    for part in method.parts:
        if part.name not in SOFT and part.stages != ["data"]:
            where = f"acts on the {' and '.join(part.stages)}" if part.stages else "changes nothing"
            raise UserError(
                f"'{part.name}' {where}, so there is no protected copy to write; protect takes data-stage defenses "
                f"(loda, ats), {' and '.join(SOFT)}."
            )
    return any(part.name in SOFT for part in method.parts)


def _read(source: Path, size: int | None) -> Originals:
    if source.is_dir():
        classes = {sub.name for sub in subfolders(source)}
        if "train" in classes:
            raise UserError(f"{source}: has a part 'train'; give that folder, whose sub-folders are the classes.")
        if not classes:
            raise UserError(f"{source}: no sub-folders; put the pictures into one sub-folder for each class.")
        images, names = by_class(source)
        paths = [Path(p) for p in images.x]
        batch = to_batch(Images(decode(paths, size), images.y))
        return Originals(batch, names, tuple(path.relative_to(source) for path in paths), False)
    if source.suffix.lower() != ".npz":
        raise UserError(f"{source}: not a folder of pictures and not an .npz file.")
    raw = read_npz(source)
    if raw.test is not None:
        raise UserError(f"{source}: holds several parts; protect takes one, as the arrays 'images' and 'labels'.")
    pixels = resize_square(raw.train.pixels, size) if size else raw.train.pixels
    return Originals(to_batch(Images(pixels, raw.train.y)), raw.class_names, None, pixels.dtype != np.uint8)


def _check_target(source: Path, target: Path, originals: Originals, soft: bool) -> None:
    if os.path.lexists(target):
        raise UserError(f"{target}: exists already; give another place, or remove it.")
    if source.resolve() in target.resolve().parents:
        raise UserError(f"{target}: lies inside {source}; give a place outside of it.")
    archive = target.suffix.lower() == ".npz"
    if soft and not archive:
        raise UserError(f"{target}: labels become soft, which folders cannot hold; give a name that ends in .npz.")
    if not soft and archive != (originals.files is None):
        wanted = "an .npz file" if originals.files is None else "a folder"
        raise UserError(f"{target}: the copy of {source} is {wanted}; give a name for that.")


def _public(text: str, private: Tensor) -> Batch:
    """Every image of another data set, but for those that are to be protected."""
    pool = load(text).pool()
    if pool.x.shape[1:] != private.shape[1:]:
        theirs, ours = (shape_text(x.shape[1:]) for x in (pool.x, private))
        raise UserError(f"public images of '{text}' are {theirs}, these are {ours}; they must be equal (see size=).")
    private_hashes = {_hash(image) for image in private}
    others = pool[[i for i, image in enumerate(pool.x) if _hash(image) not in private_hashes]]
    if not len(others):
        raise UserError(f"every public image of '{text}' is among those to protect; give others.")
    return others


def _hash(image: Tensor) -> bytes:
    return hashlib.blake2b((image * 255).round().byte().numpy().tobytes(), digest_size=16).digest()


def _normalisation(public: Batch | None, channels: int) -> tuple[Tensor, Tensor]:
    """As data sets without published constants have it: measured on public images, one half where there are none."""
    if public is None:
        return torch.full((channels,), 0.5), torch.full((channels,), 0.5)
    std, mean = torch.std_mean(public.x, dim=(0, 2, 3), correction=0)
    return mean, torch.where(std > 1e-3, std, torch.ones_like(std))


def _key(method: Defense, originals: Originals, public: Batch | None, reproducible: int | None) -> str:
    """One key for one result."""
    tensors = {"x": originals.batch.x, "y": originals.batch.y}
    tensors |= {"public x": public.x, "public y": public.y} if public else {}
    return digest(repr((method.spec, reproducible, originals.class_names, originals.files)), tensors)


@dataclass(frozen=True)
class ProtectionJob:
    """What all batches of a run share."""

    work: Path
    public: Batch | None
    classes: int
    mean: Tensor
    std: Tensor
    streams: Streams
    progress: Progress | None

    def apply(self, part: Defense, place: int, data: Batch) -> Batch:
        """One defense on all images, batch by batch; finished batches are read."""
        files = [self.work / f"{place}-{i:06d}.safetensors" for i in range(-(-len(data) // BATCH))]
        # A placeholder for the model: the defenses that are accepted here use none.
        model = ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(data.x[0].numel(), self.classes)))
        task, state = Task(model, data.image_shape, self.classes, self.mean, self.std), model.state()
        memory = None
        if not all(file.exists() for file in files):
            rng = self.streams("prepare", place)
            setup = Setup(task, state, data, self.public, cache=self.work, progress=self.progress, rng=rng)
            memory = part.prepare(setup)
        rows: list[Tensors] = []
        for i, file in enumerate(files):
            if not file.exists():
                batch = data[i * BATCH : (i + 1) * BATCH]
                step = Step(task, state, batch, self.streams("protect", place, i), memory)
                encoded = part.batch(part.data(batch, step), step)
                write_tensors(file, {"x": encoded.x, "y": encoded.y})
            rows.append(read_tensors(file))
            if self.progress:
                self.progress(part.name, i + 1, len(files))
        return Batch(torch.cat([row["x"] for row in rows]), torch.cat([row["y"] for row in rows]))


def _pixels(x: Tensor) -> Array:
    """n × H × W × C bytes."""
    return (x.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()


def _write_npz(work: Path, originals: Originals, protected: Batch, more: Tensors) -> Path:
    """Images as they were given, bytes or floats; with soft labels floats, which may lie outside [0, 1]."""
    floats = originals.floats or protected.y.is_floating_point()
    arrays = {
        "images": protected.x.permute(0, 2, 3, 1).numpy() if floats else _pixels(protected.x),
        "labels": protected.y.numpy(),
        **{name: value.numpy() for name, value in more.items()},
    }
    if originals.class_names:
        arrays["class_names"] = np.array(originals.class_names)
    temporary = work / "copy.npz"
    np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    return temporary


def _write_folder(work: Path, files: tuple[Path, ...], protected: Batch) -> Path:
    folder = work / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    for path, image in zip(_names(files), _pixels(protected.x), strict=True):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(folder / path)
    if hasattr(os, "sync"):
        os.sync()  # all of the pictures at once: one by one takes minutes
    return folder


def _names(files: tuple[Path, ...]) -> list[Path]:
    """The same names; those of lossy formats end in .png instead, after their own ending should that be taken."""
    taken, names = {file for file in files if file.suffix.lower() in LOSSLESS}, []
    for file in files:
        name = file
        if file.suffix.lower() not in LOSSLESS:
            png = file.with_suffix(".png")
            name = file.with_name(f"{file.name}.png") if png in taken else png
            taken.add(name)
        names.append(name)
    return names
