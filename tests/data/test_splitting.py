from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.core.errors import UserError
from gradveil.core.randomness import generator
from gradveil.data import DataSet, load
from gradveil.data.raw import Images, Options
from gradveil.data.split import image_keys, split, stratified_order

labels = st.lists(st.integers(0, 5), min_size=1, max_size=80).map(np.array)


@given(labels, st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_every_prefix_holds_the_classes_in_proportion(y: np.ndarray, seed: int) -> None:
    order = stratified_order(y, generator(seed))
    assert sorted(order.tolist()) == list(range(len(y)))
    for n in range(len(y) + 1):
        for label, count in Counter(y.tolist()).items():
            taken = int((y[order[:n]] == label).sum())
            # Each class is within one image of its share of the prefix, plus the slack that the other classes leave.
            assert abs(taken - n * count / len(y)) <= 1 + len(set(y.tolist())) * count / len(y)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=12, max_size=60), st.integers(0, 20), st.integers(0, 9)
)
@settings(max_examples=60, deadline=None)
def test_copies_of_an_image_never_stand_in_two_parts(drawn: list[tuple[int, int]], tests: int, seed: int) -> None:
    """Few different images, many copies, some of them in a publisher's test part."""
    x = np.array([np.full((2, 2, 1), value, dtype=np.uint8) for value, _ in drawn])
    images = Images(x, np.array([label for _, label in drawn]))
    tests = min(tests, len(x) - 10)
    train, test = images.take(np.arange(tests, len(x))), images.take(np.arange(tests)) if tests else None
    try:
        parts = split(train, test, Options(private=1), seed=seed, name="made")
    except UserError as error:
        # All copies went with the private ones, or all were in the test part already.
        assert "left for the" in str(error) or "more images than there are" in str(error)
        return
    found = [set(image_keys(part)) for part in parts]
    assert not (found[0] & found[1] or found[0] & found[2] or found[1] & found[2])
    if test is None:
        assert sum(len(part) for part in parts) == len(x)  # moved, not lost
    else:
        assert len(parts[2]) == tests


def hashes(part) -> set[bytes]:  # type: ignore[no-untyped-def]
    return {image.numpy().tobytes() for image in part.x}


def test_a_seed_is_a_split() -> None:
    first, again, other = load("mnist-5k", seed=1), load("mnist-5k", seed=1), load("mnist-5k", seed=2)
    assert torch.equal(first.private.x, again.private.x)
    assert torch.equal(first.test.y, again.test.y)
    assert 600 < len(hashes(first.private) & hashes(other.private)) < 1000  # 800 are to be expected


def test_the_global_random_stream_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load("mnist-5k:limit=200")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ("", [2000, 2000, 1000]),
        ("private=100", [100, 3267, 1633]),
        ("private=4500", [4500, 333, 167]),
        ("limit=500", [200, 200, 100]),
        ("public=none", [4000, 0, 1000]),
        ("public=none,private=50", [50, 0, 4950]),
        ("split=person", [2000, 2000, 1000]),
    ],
)
def test_how_many_images_each_part_has(settings: str, sizes: list[int]) -> None:
    data = load(f"mnist-5k:{settings}" if settings else "mnist-5k")
    assert [len(part) for part in (data.private, data.public, data.test)] == sizes
    shares = torch.bincount(data.private.y, minlength=10)
    if "person" not in settings:
        assert int(shares.max() - shares.min()) <= 1


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ("private=5001", "more images than there are"),
        ("private=5000", "no images are left for the test part"),
        ("private=0", "greater than or equal to 1"),
        ("limit=3", "greater than or equal to 10"),
        ("split=face", "split='face'"),
        ("split=person,public=none", "leave out public=none"),
        ("public=nothing-known", "no data set 'nothing-known'"),
    ],
)
def test_settings_that_cannot_be_met(settings: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load(f"mnist-5k:{settings}")


def test_people_of_the_public_part_occur_nowhere_else(tmp_path: Path, made: Callable) -> None:
    x, y = made(100, 6, 6, 1, classes=10)
    np.savez(tmp_path / "faces.npz", images=x, labels=y)
    data = load(f"{tmp_path}/faces.npz:split=person")
    public = set(data.public.y.tolist())
    assert len(public) == 4
    assert len(data.public) == 40
    assert not public & {*data.private.y.tolist(), *data.test.y.tolist()}
    assert data.num_classes == 10  # labels are kept
    assert [len(data.private), len(data.test)] == [40, 20]

    np.savez(tmp_path / "parts.npz", train_images=x[:70], train_labels=y[:70], test_images=x[70:], test_labels=y[70:])
    data = load(f"{tmp_path}/parts.npz:split=person")
    assert len(data.pool()) == 100
    assert not set(data.public.y.tolist()) & {*data.private.y.tolist(), *data.test.y.tolist()}


def test_another_set_as_the_public_part(tmp_path: Path, made: Callable) -> None:
    x, y = made(60, 8, 8, 3)
    other, labels = made(30, 8, 8, 3, classes=15, seed=1)
    other[:5] = x[:5]  # images that the private side has too
    np.savez(tmp_path / "own.npz", images=x, labels=y)
    np.savez(tmp_path / "other.npz", images=other.astype(np.float32) / 255, labels=labels)
    data = load(f"{tmp_path}/own.npz:public={tmp_path}/other.npz")
    assert [len(part) for part in (data.private, data.public, data.test)] == [48, 25, 12]
    assert data.public_from == f"{tmp_path}/other.npz"
    assert data.public.y.max() == 14  # of the other set's classes
    assert torch.allclose(data.mean, data.public.x.mean((0, 2, 3)))
    np.savez(tmp_path / "grey.npz", images=x[..., :1], labels=y)
    with pytest.raises(UserError, match="are 8×8×1, these are 8×8×3"):
        load(f"{tmp_path}/own.npz:public={tmp_path}/grey.npz")
    with pytest.raises(UserError, match="every image"):
        load(f"{tmp_path}/own.npz:public={tmp_path}/own.npz")


def test_all_images_may_be_private_where_a_test_part_exists(tmp_path: Path, made: Callable) -> None:
    x, y = made(60, 8, 8, 3)
    np.savez(tmp_path / "a.npz", train_images=x[:50], train_labels=y[:50], test_images=x[50:], test_labels=y[50:])
    data = load(f"{tmp_path}/a.npz:private=50")
    assert [len(part) for part in (data.private, data.public, data.test)] == [50, 0, 10]
    assert data.mean.tolist() == [0.5] * 3  # nothing public to measure it on
    assert data.input_shape == (3, 8, 8)


def test_parts_in_bytes_and_in_floats(tmp_path: Path, made: Callable) -> None:
    x, y = made(60, 8, 8, 3)
    floats = x[50:].astype(np.float32) / 255
    np.savez(tmp_path / "a.npz", train_images=x[:50], train_labels=y[:50], test_images=floats, test_labels=y[50:])
    np.savez(tmp_path / "b.npz", images=255 - x, labels=y)
    for data in (load(f"{tmp_path}/a.npz:split=person"), load(f"{tmp_path}/b.npz:public={tmp_path}/a.npz")):
        found = {image.tobytes() for image in (data.pool().x.numpy() * 255).round().astype(np.uint8).transpose(0, 2, 3, 1)}
        assert {image.tobytes() for image in x} <= found


def test_a_limit_leaves_some_of_each_part(tmp_path: Path, made: Callable) -> None:
    x, y = made(60, 8, 8, 3)
    np.savez(tmp_path / "a.npz", train_images=x[:59], train_labels=y[:59], test_images=x[59:], test_labels=y[59:])
    data = load(f"{tmp_path}/a.npz:limit=10")
    assert [len(part) for part in (data.private, data.public, data.test)] == [5, 4, 1]


def test_a_data_set_is_taken_as_it_is() -> None:
    data = load("mnist-5k:limit=100")
    assert load(data) is data
    assert repr(data) == "DataSet('mnist-5k:limit=100': 40 private, 40 public, 20 test, 10 classes, 1×28×28)"
    assert isinstance(data, DataSet)
