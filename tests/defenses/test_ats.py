"""ATS's functions against Pillow, bit for bit; its policies; what it keeps secret."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn

from gradveil.attacks.suite import accepted_counters
from gradveil.client import Client, prepare_client
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.randomness import generator
from gradveil.core.task import Task
from gradveil.core.types import Batch
from gradveil.defenses import parse
from gradveil.defenses.base import Setup
from gradveil.defenses.data.ats.defense import ATS, Draw, parse_policies, random_policy, transform, write_policy
from gradveil.defenses.data.ats.transforms import FUNCTIONS, apply


def pillow(image: Image.Image, index: int, sign: float) -> Image.Image:
    """One function of the library as its authors call Pillow for it (black fill, grey for rotation)."""
    operation, m = FUNCTIONS[index]
    width, height = image.size
    if operation == "shearY":
        return image.transform(image.size, Image.AFFINE, (1, 0, 0, m * sign, 1, 0), Image.BICUBIC, fillcolor=(0, 0, 0))
    if operation in ("translateX", "translateY"):
        move = (m * width * sign, 0) if operation == "translateX" else (0, m * height * sign)
        return image.transform(image.size, Image.AFFINE, (1, 0, move[0], 0, 1, move[1]), fillcolor=(0, 0, 0))
    if operation == "rotate":
        turned = image.convert("RGBA").rotate(m)
        return Image.composite(turned, Image.new("RGBA", turned.size, (128,) * 4), turned).convert(image.mode)
    if operation in ("color", "contrast", "sharpness", "brightness"):
        return getattr(ImageEnhance, operation.capitalize())(image).enhance(1 + m * sign)
    if operation == "posterize":
        return ImageOps.posterize(image, int(m))
    if operation == "solarize":
        return ImageOps.solarize(image, m)
    return getattr(ImageOps, operation)(image)


def pictures(height: int, width: int) -> np.ndarray:
    """Noise, a dull one, a flat one, a smooth one, two levels, black."""
    rng = np.random.default_rng(height)
    x = rng.integers(0, 256, (6, height, width, 3), dtype=np.uint8)
    x[1] = x[1] // 4 + 40
    x[2] = 77
    x[3] = np.array(Image.fromarray(x[3]).resize((5, 5)).resize((width, height), Image.BICUBIC))
    x[4] = (x[4] > 128) * 200
    x[5] = 0
    return x


def tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255


def levels(x: Tensor) -> np.ndarray:
    return (x * 255).round().permute(0, 2, 3, 1).numpy().astype(int)


@pytest.mark.parametrize("index", range(50))
def test_function_is_pillows(index: int) -> None:
    for shape in ((32, 32), (28, 28), (24, 40)):
        x = pictures(*shape)
        for sign in (1.0, -1.0):
            ours = levels(apply(tensor(x), [index], torch.full((len(x), 1), sign)))
            theirs = np.stack([np.array(pillow(Image.fromarray(image), index, sign)) for image in x])
            np.testing.assert_array_equal(ours, theirs, err_msg=str(FUNCTIONS[index]))


def test_library_is_the_published_one() -> None:
    """The functions that the paper's section 5.4 names by index, and those that do nothing."""
    assert len(FUNCTIONS) == 50
    named = [FUNCTIONS[i] for i in (3, 15, 18, 26, 1)]
    assert [f.operation for f in named] == ["translateX", "brightness", "contrast", "brightness", "contrast"]
    assert [f.magnitude for f in named] == pytest.approx([150 / 331, 0.5, 7 / 18, 1 / 3, 1 / 3])
    assert FUNCTIONS[11].magnitude == 6  # bits
    x = tensor(pictures(32, 32))
    for nothing in (28, 39):
        assert torch.equal(apply(x, [nothing], torch.ones(6, 1)), x)


@pytest.mark.parametrize("index", sorted({FUNCTIONS.index(f) for f in FUNCTIONS}))
def test_grey_images_go_as_rgb(index: int) -> None:
    """F-MNIST in the authors' pipeline: to RGB, the functions, back to grey."""
    grey = pictures(28, 28)[..., 0]
    ours = levels(apply(tensor(grey[..., None]), [index], torch.ones(6, 1)))[..., 0]
    theirs = [np.array(pillow(Image.fromarray(g).convert("RGB"), index, 1.0).convert("L")) for g in grey]
    np.testing.assert_array_equal(ours, np.stack(theirs))


def test_policy_in_order_and_every_image_its_own_signs() -> None:
    x = pictures(32, 32)
    signs = torch.tensor([[1, -1, 1], [-1, 1, -1], [1, 1, 1], [-1, -1, -1], [1, -1, -1], [-1, 1, 1]]).float()
    ours = levels(apply(tensor(x), [3, 1, 10], signs))
    for n, image in enumerate(x):
        step = Image.fromarray(image)
        for index, sign in zip((3, 1, 10), signs[n].tolist(), strict=True):
            step = pillow(step, index, sign)
        np.testing.assert_array_equal(ours[n], np.array(step))


def test_only_grey_or_rgb() -> None:
    with pytest.raises(UserError, match="grey or RGB"):
        apply(torch.rand(1, 4, 8, 8), [0], torch.ones(1, 1))


def client(spec: str) -> tuple[Client, dict[str, Tensor], Batch]:
    function = ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)))
    state, batch = function.state(), Batch(tensor(pictures(32, 32)).repeat(4, 1, 1, 1), torch.arange(24) % 10)
    task = Task(function, (3, 32, 32), 10, torch.full((3,), 0.5), torch.full((3,), 0.25))
    return prepare_client(parse(spec), LocalTraining(), Setup(task, state, batch)), state, batch


def test_secrets_tell_what_every_image_became() -> None:
    """Crop, flip and policy of each image, done over with Pillow from the secrets alone."""
    ats, state, batch = client("ats")
    _, trace = ats.round(state, batch, 0)
    policies = parse_policies("3-1-7+43-18-18")
    which, signs, crop, flip = (trace.secrets[f"ats.{name}"] for name in ("policy", "signs", "crop", "flip"))
    assert set(which.tolist()) == {0, 1} and set(flip.tolist()) == {True, False} and set(signs.flatten().tolist()) == {-1, 1}
    assert crop.min() >= 0 and crop.max() <= 8 and len(set(crop[:, 0].tolist())) > 3
    original, fed = levels(batch.x).astype(np.uint8), levels(trace.fed.x)
    for n in range(len(batch)):
        top, left = crop[n].tolist()
        image = np.pad(original[n], ((4, 4), (4, 4), (0, 0)))[top : top + 32, left : left + 32]
        done = Image.fromarray(image[:, ::-1].copy() if flip[n] else image)
        for index, sign in zip(policies[int(which[n])], signs[n].tolist(), strict=True):
            done = pillow(done, index, sign)
        np.testing.assert_array_equal(fed[n], np.array(done))


def test_draws_come_from_the_clients_stream() -> None:
    ats, state, batch = client("ats")
    first, again, other = (ats.protect(state, batch, key)[0].x for key in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(ats.protect(state, batch, 0)[0].y, batch.y)


def test_crop_and_flip_can_be_left_out() -> None:
    ats, state, batch = client("ats:policy=28,crop=0,flip=false")
    assert torch.equal(ats.protect(state, batch, 0)[0].x, (batch.x * 255).round() / 255)


def test_policies_of_unequal_length() -> None:
    policies = parse_policies("3-1-7+0")
    draw = Draw.make(8, policies, 0, False, generator(0))
    x = torch.rand(8, 1, 28, 28)
    inverted = transform(x, policies, draw, 0)[draw.policy == 1]
    assert torch.allclose(inverted, 1 - (x[draw.policy == 1] * 255).round() / 255)


def test_text_of_policies() -> None:
    published = ("3-1-7+43-18-18", "21-13-3+7-4-15", "19-15-45+2-43-21", "42-28-42+14-48-48")
    for text in published:
        assert write_policy(parse_policies(text)) == text
    assert parse("ats").spec == "ats"
    assert parse("ats:policy=21-13-3+7-4-15+prune:ratio=0.5").spec == "ats:policy=21-13-3+7-4-15+prune:ratio=0.5"
    assert parse("ats").stages == ["data"] and parse("ats").random and accepted_counters(ATS) == ("ats-early", "ats-policy")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("3-1-7+43-1-18", "may not share function 1"),
        ("3-1-50", "no function 50"),
        ("1-2-3-4", "at most 3"),
        ("3--1", "not an ATS policy"),
        ("hybrid", "not an ATS policy"),
        ("nowhere.json", "cannot read"),
    ],
)
def test_bad_policies_are_told_in_one_line(policy: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse(f"ats:policy={policy}")
    assert "\n" not in str(caught.value)


def test_random_policies() -> None:
    rng = generator(0)
    drawn = [random_policy(rng) for _ in range(5000)]  # one function alone is one in a thousand
    assert {len(p) for p in drawn} == {1, 2, 3} and len(set(drawn)) > 4500
    assert {i for p in drawn for i in p} == set(range(50))
    assert parse("ats:policy=random,seed=1").policies() == parse("ats:policy=random,seed=1").policies()
    assert parse("ats:policy=random,seed=1").policies() != parse("ats:policy=random,seed=2").policies()


def test_policy_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"schema": 1, "policy": "7-4-15+21-13-3"}))
    found = parse(f"ats:policy={file}")
    assert found.policies() == ((7, 4, 15), (21, 13, 3)) and found.spec == f"ats:policy={file}"
    for bad in ("{", "[1]", '{"policy": 3}'):
        file.write_text(bad)
        with pytest.raises(UserError, match="gradveil search"):
            parse(f"ats:policy={file}")


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "null", '{"policy": ["3-1-7"]}', '{"policy": "' + "3-1-7+" * 100_000 + '1"}', "é"]
)
def test_a_policy_file_of_a_stranger_is_told_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError) as error:
        parse(f"ats:policy={tmp_path}/policy.json")
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_no_policy_crops_and_flips_alone() -> None:
    """The control of the paper's tables: what every training of the authors does, and no function."""
    assert ATS(policy="none").policies() == ((),)
    images = torch.from_numpy(pictures(8, 8)).permute(0, 3, 1, 2).float() / 255
    draw = Draw.make(len(images), ((),), 4, True, generator(0, "draw"))
    moved = transform(images, ((),), draw, 4)
    for image, after, (top, left), flip in zip(images, moved, draw.crop.tolist(), draw.flip.tolist(), strict=True):
        padded = torch.nn.functional.pad(image, (4, 4, 4, 4))[:, top : top + 8, left : left + 8]
        assert torch.equal(after, padded.flip(2) if flip else padded)


def test_the_crop_of_fashion_mnist_is_that_of_the_authors() -> None:
    """They crop 32 of 36: a garment of 28 pixels, padded by 4. Here `pad=2` makes 32 of 28, and `crop=2` crops 32 of 36."""
    garment = torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    theirs = torch.nn.functional.pad(garment, (4, 4, 4, 4))
    ours = torch.nn.functional.pad(garment, (2, 2, 2, 2))
    for top, left in [(0, 0), (4, 1), (2, 3)]:
        draw = Draw(torch.zeros(1, dtype=torch.long), torch.ones(1, 0), torch.tensor([[top, left]]), torch.tensor([False]))
        cropped = transform(ours, ((),), draw, 2)
        assert torch.equal((cropped * 255).round(), (theirs[..., top : top + 32, left : left + 32] * 255).round())


def test_every_step_draws_anew() -> None:
    step, once = ATS(policy="3-1-7", every_step=True), ATS(policy="3-1-7")
    assert (step.stages, once.stages) == (["batch"], ["data"])
    batch = Batch(torch.rand(4, 1, 8, 8), torch.arange(4))
    task = Task(ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(64, 4))), (1, 8, 8), 4, torch.zeros(1), torch.ones(1))
    state = task.model.state()
    for defense, rounds_differ in ((step, True), (once, False)):
        client = prepare_client(defense, LocalTraining(), Setup(task, state, batch))
        protected, _ = client.protect(state, batch, 0)
        fed = [client.round(state, batch, 0, number, protected=protected)[1].fed.x for number in range(2)]
        assert torch.equal(*fed) is not rounds_differ
