"""Protected copies: names, labels and formats kept, resumed after a kill, whole or not at all, refusals in one line."""

import json
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from gradveil.cli.protect import command
from gradveil.core.errors import UserError
from gradveil.core.randomness import generator
from gradveil.defenses.data.ats.defense import ATS
from gradveil.protection import dataset as protecting
from gradveil.protection.dataset import protect_files

ATS_SPEC = "ats:policy=15-1,crop=1"


def pictures(folder: Path, n: int = 12, suffix: str = ".png", grey: bool = True) -> Path:
    rng = np.random.default_rng(0)
    for i in range(n):
        file = folder / ("cat", "dog")[i % 2] / ("deep" if i == 3 else "") / f"scan {i}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (10, 10) if grey else (10, 10, 3), dtype=np.uint8)).save(file)
    return folder


def archive(path: Path, n: int = 12, **more: np.ndarray) -> Path:
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (n, 10, 10, 1), dtype=np.uint8)
    np.savez(path, images=images, labels=np.arange(n) % 3, **more)
    return path


def tree(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_a_folder_keeps_its_classes_and_names(tmp_path):
    source = pictures(tmp_path / "data")
    copy = protect_files(source, tmp_path / "safe", ATS_SPEC)
    assert tree(tmp_path / "safe") == tree(source)
    assert {p.name for p in tmp_path.iterdir()} == {"data", "safe"}  # no work is left behind
    for i, name in enumerate(sorted(tree(source))):
        before, after = (np.asarray(Image.open(root / name)) for root in (source, tmp_path / "safe"))
        assert after.shape == before.shape
        assert not np.array_equal(after, before)
        assert np.array_equal(after, (copy.protected.x[i, 0].numpy() * 255).round().astype(np.uint8))


def test_lossy_names_become_png_without_clashes(tmp_path):
    source = pictures(tmp_path / "data", suffix=".jpg", grey=False)
    clash = source / "cat" / "scan 0.png"
    Image.new("RGB", (10, 10)).save(clash)
    protect_files(source, tmp_path / "safe", ATS_SPEC)
    found = tree(tmp_path / "safe")
    assert len(found) == 13
    assert {"cat/scan 0.png", "cat/scan 0.jpg.png", "dog/scan 1.png"} <= found
    assert np.asarray(Image.open(tmp_path / "safe" / "dog" / "scan 1.png")).shape == (10, 10, 3)


def test_an_archive_keeps_labels_and_type_and_drops_what_is_unknown(tmp_path):
    source = archive(tmp_path / "in.npz", class_names=np.array(["a", "b", "c"]), patient=np.arange(12))
    protect_files(source, tmp_path / "out.npz", ATS_SPEC)
    with np.load(source) as before, np.load(tmp_path / "out.npz", allow_pickle=False) as after:
        assert set(after.files) == {"images", "labels", "class_names"}
        assert after["images"].dtype == np.uint8
        assert after["images"].shape == before["images"].shape
        assert np.array_equal(after["labels"], before["labels"])
        assert (after["images"] != before["images"]).mean() > 0.5


def test_mixup_writes_soft_labels(tmp_path):
    source = archive(tmp_path / "in.npz")
    protect_files(source, tmp_path / "out.npz", "mixup:k=3")
    with np.load(tmp_path / "out.npz") as after:
        assert after["labels"].shape == (12, 3)
        np.testing.assert_allclose(after["labels"].sum(axis=1), 1, rtol=1e-5)
        assert (after["labels"].max(axis=1) < 1).any()
        assert after["images"].dtype == np.float32
        assert 0 <= after["images"].min() < after["images"].max() <= 1


def test_instahide_tells_the_normalisation_it_flipped_signs_in(tmp_path):
    source = pictures(tmp_path / "data")
    copy = protect_files(source, tmp_path / "out.npz", "instahide:k=2")
    with np.load(tmp_path / "out.npz") as after:
        assert after["labels"].shape == (12, 2)
        assert list(after["class_names"]) == ["cat", "dog"]
        seen = (after["images"] - after["mean"]) / after["std"]
        assert (seen < 0).any() and (seen > 0).any()
        torch.testing.assert_close(torch.from_numpy(after["images"]).permute(0, 3, 1, 2), copy.protected.x)


def test_a_chain_mixes_what_the_first_defense_made(tmp_path):
    source = archive(tmp_path / "in.npz")
    first = protect_files(source, tmp_path / "first.npz", ATS_SPEC, reproducible=0).protected.x
    mixed = protect_files(source, tmp_path / "both.npz", f"{ATS_SPEC}+mixup:k=2", reproducible=0).protected
    # Each mixed image is in the span of two protected ones, so none of it is an unprotected partner.
    flat = first.flatten(1).double()
    for image in mixed.x.flatten(1).double():
        pairs = [flat[[i, j]] for i in range(12) for j in range(i)]
        errors = [torch.linalg.lstsq(p.T, image[:, None]).solution for p in pairs]
        assert min(float((p.T @ w - image[:, None]).norm()) for p, w in zip(pairs, errors, strict=True)) < 1e-4


def test_a_killed_run_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(protecting, "BATCH", 4)
    source, target = archive(tmp_path / "in.npz", n=18), tmp_path / "out.npz"
    whole = protect_files(source, tmp_path / "whole.npz", ATS_SPEC, reproducible=5).protected.x

    def killed(what: str, done: int, total: int) -> None:
        assert (what, total) == ("ats", 5)
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        protect_files(source, target, ATS_SPEC, reproducible=5, progress=killed)
    assert not target.exists()

    calls = []
    real = ATS.data
    monkeypatch.setattr(ATS, "data", lambda self, batch, step: calls.append(len(batch)) or real(self, batch, step))
    again = protect_files(source, target, ATS_SPEC, reproducible=5).protected.x
    assert calls == [4, 2]  # only what was missing
    assert torch.equal(again, whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.npz", "out.npz", "whole.npz"]


def test_unfinished_work_of_other_settings_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(protecting, "BATCH", 4)
    source, target = archive(tmp_path / "in.npz"), tmp_path / "out.npz"

    def killed(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        protect_files(source, target, ATS_SPEC, reproducible=1, progress=killed)
    found = protect_files(source, target, ATS_SPEC, reproducible=2).protected.x
    assert torch.equal(found, protect_files(source, tmp_path / "fresh.npz", ATS_SPEC, reproducible=2).protected.x)


def test_a_killed_run_without_a_seed_keeps_its_secret_until_it_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(protecting, "BATCH", 4)
    source, target = archive(tmp_path / "in.npz", n=18), tmp_path / "out.npz"

    def killed(what: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        protect_files(source, target, ATS_SPEC, progress=killed)
    note = tmp_path / ".out.npz.unfinished" / protecting.MARKER
    assert stat.S_IMODE(note.stat().st_mode) == 0o600
    secret = bytes.fromhex(json.loads(note.read_text())["secret"])
    assert len(secret) == 32
    resumed = protect_files(source, target, ATS_SPEC).protected.x
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.npz", "out.npz"]  # the secret went with the folder
    other = protect_files(source, tmp_path / "other.npz", ATS_SPEC).protected.x
    assert not torch.equal(resumed, other)
    monkeypatch.setattr(protecting.secrets, "token_bytes", lambda size: secret)
    assert torch.equal(resumed, protect_files(source, tmp_path / "same.npz", ATS_SPEC).protected.x)


def test_a_copy_is_not_drawn_from_a_seed_that_can_be_guessed(tmp_path):
    """With the images at hand, the draws of small seeds do not give the copy."""
    source = archive(tmp_path / "in.npz")
    copy = protect_files(source, tmp_path / "out.npz", ATS_SPEC)
    for seed in range(3):
        step = SimpleNamespace(rng=generator(seed, "protect", 0, 0), secrets={})
        drawn = ATS(policy="15-1", crop=1).data(copy.original, step).x
        assert (drawn - copy.protected.x).abs().mean() > 0.05


def test_loda_starts_from_public_images_and_never_from_those_to_protect(tmp_path, monkeypatch):
    from gradveil.defenses.data.loda import defense as loda
    from gradveil.defenses.data.loda import extractors

    monkeypatch.setattr(extractors, "STEPS", 10)
    source = archive(tmp_path / "in.npz")
    rng = np.random.default_rng(2)
    with np.load(source) as own:
        images = np.concatenate([own["images"], rng.integers(0, 256, (20, 10, 10, 1), dtype=np.uint8)])
        labels = np.concatenate([own["labels"], np.arange(20) % 3])
    np.savez(tmp_path / "public.npz", images=images, labels=labels)
    pools = []
    real = loda.Loda.prepare
    monkeypatch.setattr(loda.Loda, "prepare", lambda self, setup: pools.append(setup.public) or real(self, setup))
    copy = protect_files(source, tmp_path / "out.npz", "loda:steps=3", public=str(tmp_path / "public.npz"))
    assert len(pools[0]) == 20
    assert len(copy.protected) == 12
    with np.load(tmp_path / "out.npz") as after:
        assert after["images"].dtype == np.uint8


@pytest.mark.parametrize("spec", ["dcs2", "precode", "prune", "gaussian", "none", "ats+prune"])
def test_other_stages_are_refused(tmp_path, spec):
    source = archive(tmp_path / "in.npz")
    with pytest.raises(UserError, match="data-stage") as refused:
        protect_files(source, tmp_path / "out.npz", spec)
    assert "\n" not in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in.npz"]


def test_places_that_do_not_fit_are_refused(tmp_path):
    source, npz = pictures(tmp_path / "data"), archive(tmp_path / "in.npz")
    for target, spec, words in (
        (tmp_path / "in.npz", "ats", "exists already"),
        (source / "safe", "ats", "inside"),
        (tmp_path / "soft", "mixup", ".npz"),
        (tmp_path / "safe.npz", "ats", "a folder"),
    ):
        with pytest.raises(UserError, match=words):
            protect_files(source, target, spec)
    with pytest.raises(UserError, match=r"an \.npz file"):
        protect_files(npz, tmp_path / "safe", "ats")
    with pytest.raises(UserError, match=r"not an \.npz file"):
        protect_files(tmp_path / "missing", tmp_path / "safe", "ats")
    assert {p.name for p in tmp_path.iterdir()} == {"data", "in.npz"}


def test_a_defense_that_cannot_work_here_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    source = archive(tmp_path / "in.npz")
    for spec, words in (("loda", "public images"), ("mixup:k=13", "only 12")):
        with pytest.raises(UserError, match=words):
            protect_files(source, tmp_path / "out.npz", spec)
    assert [p.name for p in tmp_path.iterdir()] == ["in.npz"]


def test_the_command(tmp_path):
    app = typer.Typer()
    app.command()(command)
    source = pictures(tmp_path / "data")
    shown = CliRunner().invoke(app, [str(source), str(tmp_path / "a"), "--defense", ATS_SPEC])
    assert shown.exit_code == 0, shown.output
    assert "12 images" in shown.output and "dB" in shown.output
    silent = CliRunner().invoke(app, [str(source), str(tmp_path / "b"), "--defense", ATS_SPEC, "--quiet"])
    assert silent.exit_code == 0 and not silent.output
    for target in ("c", "d"):
        options = ["--defense", ATS_SPEC, "--quiet", "--reproducible", "1"]
        seeded = CliRunner().invoke(app, [str(source), str(tmp_path / target), *options])
        assert seeded.exit_code == 0 and not seeded.stdout
        assert len(seeded.stderr.splitlines()) == 1
        assert "everyone who knows the seed can undo it" in seeded.stderr
    files = [[path.read_bytes() for path in sorted((tmp_path / which).rglob("*.png"))] for which in "abcd"]
    assert files[0] != files[1]  # no seed, no two copies alike
    assert files[2] == files[3] != files[0]


@pytest.mark.parametrize("name", ["notes.txt", ".env.local", "run.json", "0-000000.safetensors"])
def test_a_users_folder_where_unfinished_work_would_go_is_refused_and_kept(name: str, tmp_path: Path) -> None:
    source, target = archive(tmp_path / "in.npz"), tmp_path / "out.npz"
    kept = tmp_path / ".out.npz.unfinished" / name
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(UserError, match="not gradveil's"):
        protect_files(source, target, ATS_SPEC)
    assert kept.read_text() == "mine" and [p.name for p in kept.parent.iterdir()] == [name]
    assert not target.exists()


@pytest.mark.parametrize("text", ["", "[]", "null", '{"key": 1}', "{" * 5000, '{"key": "x", "secret": "zz"}'])
def test_a_damaged_marker_starts_the_work_again(text: str, tmp_path: Path) -> None:
    source, target = archive(tmp_path / "in.npz"), tmp_path / "out.npz"
    marker = tmp_path / ".out.npz.unfinished" / protecting.MARKER
    marker.parent.mkdir()
    marker.write_text(text)
    assert len(protect_files(source, target, ATS_SPEC).protected) > 0
    assert target.exists() and not marker.parent.exists()


def test_a_link_to_nothing_is_the_users_too(tmp_path: Path) -> None:
    source, target = archive(tmp_path / "in.npz"), tmp_path / "out.npz"
    target.symlink_to("not-mounted")
    with pytest.raises(UserError, match="exists already"):
        protect_files(source, target, ATS_SPEC)
    assert str(target.readlink()) == "not-mounted"


@pytest.mark.parametrize("kind", ["archive", "folder"])
@pytest.mark.parametrize("content", ["a file", "a folder"])
def test_what_appears_meanwhile_is_not_replaced(
    kind: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = archive(tmp_path / "in.npz") if kind == "archive" else pictures(tmp_path / "in")
    target, name = tmp_path / ("out.npz" if kind == "archive" else "out"), f"_write_{'npz' if kind == 'archive' else 'folder'}"
    mine, write = target / "notes" if content == "a folder" else target, getattr(protecting, name)

    def late(*arguments: object) -> Path:
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        return write(*arguments)

    monkeypatch.setattr(protecting, name, late)
    with pytest.raises(UserError, match="exists already"):
        protect_files(source, target, ATS_SPEC)
    assert mine.read_text() == "mine" and not (tmp_path / f".{target.name}.unfinished").exists()


def test_a_disk_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    assert protect_files(archive(tmp_path / "in.npz"), tmp_path / "out.npz", ATS_SPEC).path.is_file()
