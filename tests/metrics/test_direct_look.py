"""The direct look: correlation at every offset against a plain loop, every reading, and nothing where nothing is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradveil.core.types import Tensors
from gradveil.metrics.direct_look import ENOUGH_VALUES, MOST_VALUES, _windows, direct_look
from gradveil.metrics.leak_test import Slots, exchange_test

SIZE, VICTIMS, STRANGERS = 12, 4, 40
SLOTS = Slots(np.arange(VICTIMS), np.zeros(VICTIMS, dtype=np.int64), np.zeros(STRANGERS, dtype=np.int64))
STATE = {"weight": torch.randn(40, 50, generator=torch.Generator().manual_seed(9)), "bias": torch.zeros(40)}


def pictures(channels: int = 1, seed: int = 0) -> Tensor:
    """Smooth images of one kind: something in common, and differences."""
    draw = torch.Generator().manual_seed(seed)
    coarse = 0.2 * torch.rand(1, channels, 4, 4, generator=draw) + torch.rand(
        VICTIMS + STRANGERS, channels, 4, 4, generator=draw
    )
    return torch.nn.functional.interpolate(coarse, SIZE, mode="bilinear") / 1.2


def noise(seed: int) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {name: 0.01 * torch.randn(t.shape, generator=draw) for name, t in STATE.items()}


def look(images: Tensor, hide) -> tuple[float, list]:
    """p of the test on the look alone, and where the victims are seen. `hide(image, update)` returns what is sent."""
    sent = [[hide(images[v], noise(v))] for v in range(VICTIMS)]
    table, sights = direct_look(sent, STATE, images, SLOTS)
    return exchange_test(table.numpy(), SLOTS, 0).p, sights


def at(image: Tensor, update: Tensors, place: int = 321) -> Tensors:
    """The image in a slice of the weight."""
    values = image.flatten()
    update["weight"].view(-1)[place : place + len(values)] = values
    return update


def bits(image: Tensor, update: Tensors, low: int) -> Tensors:
    """The image in the lowest bits of the weight."""
    levels = (image.flatten() * (2**low - 1)).round().int()
    words = update["weight"].view(-1)[100 : 100 + len(levels)].view(torch.int32)
    words.copy_((words & -(2**low)) | levels)
    return update


def columns(image: Tensor, update: Tensors) -> Tensors:
    turned = update["weight"].T.contiguous()
    turned.view(-1)[77 : 77 + image.numel()] = image.flatten()
    return {**update, "weight": turned.T.contiguous()}


def of_the_model(image: Tensor, update: Tensors) -> Tensors:
    part = STATE["weight"].flatten()[200 : 200 + image.numel()]
    return at(image.flatten() * part, update, 200)


def secret_signs(image: Tensor, update: Tensors) -> Tensors:
    signs = torch.randint(0, 2, (image.numel(),), generator=torch.Generator().manual_seed(int(1e6 * image.sum()))) * 2 - 1
    return at(image.flatten() * signs, update)


HIDDEN = {
    "values": at,
    "columns": columns,
    "sizes": secret_signs,
    "signs": lambda x, u: {**u, "more": torch.where(x > x.median(), 1.0, -1.0) * torch.rand(x.shape)},
    "ratios to the model": of_the_model,
    "1 lowest bits": lambda x, u: bits((x > x.median()).float(), u, 1),
    "4 lowest bits": lambda x, u: bits(x, u, 4),
    "8 lowest bits": lambda x, u: bits(x, u, 8),
    "16 lowest bits": lambda x, u: bits(x, u, 16),
    "differences": lambda x, u: {**u, "a": (r := torch.randn(x.shape) * 100), "b": r + x},
    "ratios": lambda x, u: {**u, "a": (r := torch.randn(x.shape)), "b": r / (x + 0.1)},
}


@pytest.mark.parametrize("reading", HIDDEN)
def test_an_image_is_seen_in_every_reading(reading):
    torch.manual_seed(0)
    p, sights = look(pictures(), HIDDEN[reading])
    assert p <= 0.01
    seen = [sight.likeness > 0.9 for sight in sights]
    assert any(seen) if reading in {"signs", "1 lowest bits"} else all(seen)  # one bit per pixel tells less
    assert reading in {sight.reading for sight in sights}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (lambda x: x, "values"),
        (lambda x: x.movedim(0, -1), "values (channels last)"),
        (lambda x: x.mean(dim=0), "values (grey)"),
        (lambda x: torch.nn.functional.avg_pool2d(x.mean(dim=0, keepdim=True), 2), "values (half size)"),
    ],
)
def test_a_colour_image_is_seen_however_it_is_written(written, name):
    images = pictures(channels=3)
    p, sights = look(images, lambda x, u: {**u, "more": written(x)})
    assert p <= 0.002
    assert {sight.tensor for sight in sights} == {"more"}
    assert name in {sight.reading for sight in sights}


def test_nothing_is_seen_in_noise_nor_in_the_image_of_another():
    alarms = [look(pictures(seed=s), lambda _, u: u)[0] <= 0.05 for s in range(12)]
    others = [look(p := pictures(seed=s), lambda _, u, p=p: at(p[-1], u))[0] <= 0.05 for s in range(12)]
    assert sum(alarms) <= 3
    assert sum(others) <= 3


def test_odd_tensors_are_read_without_an_error():
    odd = {
        "weight": torch.randn(40, 50, dtype=torch.complex64), "bias": torch.ones(40, dtype=torch.uint16),
        "empty": torch.zeros(0), "one": torch.tensor(1), "half": torch.rand(9, 9).half(), "bool": torch.rand(400) > 0.5,
        "complex": torch.randn(200, dtype=torch.complex64), "infinite": torch.full((300,), torch.inf),
        "brain": torch.rand(300).bfloat16(), "bytes": torch.arange(200).to(torch.uint8), "nan": torch.full((300,), torch.nan),
        "double": torch.rand(300).double(),
    }  # fmt: skip
    table, _ = direct_look([[odd]] * VICTIMS, STATE, pictures(), SLOTS)
    assert table.isfinite().all()
    assert not direct_look([[{}]] * VICTIMS, STATE, pictures(), SLOTS)[0].any()


@pytest.mark.parametrize(
    "written",
    [
        lambda x: (60000 * x).to(torch.uint16),
        lambda x: (2.0**62 * x).to(torch.uint64),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: torch.complex(x, x).conj(),
    ],
)
def test_an_image_is_seen_in_kinds_of_numbers_that_torch_cannot_compute_with(written):
    p, sights = look(pictures(), lambda x, u: {**u, "more": written(x)})
    assert p <= 0.002
    assert {sight.tensor for sight in sights} == {"more"}


@pytest.mark.parametrize("size", [1e6, 1e20])
def test_large_numbers_do_not_hide_what_stands_beside_them(size):
    images = pictures()
    for hide in (
        lambda x, u: {**u, "more": torch.cat([torch.tensor([size]), x.flatten()])},
        lambda x, u: {"weight": size * u["weight"], "more": x},
    ):
        p, sights = look(images, hide)
        assert p <= 0.002
        assert {sight.tensor for sight in sights} == {"more"}
    assert look(images, lambda x, u: {"weight": size * u["weight"], "more": torch.zeros_like(x)})[0] > 0.05


def test_size_does_not_matter():
    for factor in (1e-30, 1e30):
        p, sights = look(pictures(), lambda x, u, f=factor: {n: f * t.double() for n, t in at(x, u).items()})
        assert p <= 0.002
        assert all(sight.likeness > 0.99 for sight in sights)


def test_an_image_across_two_tensors_is_seen():
    def split(x: Tensor, update: Tensors) -> Tensors:
        first, second = x.flatten().tensor_split(2)
        return {**update, "a": first, "b": second}

    assert look(pictures(), split)[0] <= 0.002


def test_victims_and_strangers_are_treated_alike():
    """Exchanging two images changes nothing but their names."""
    images, sent = pictures(), [[at(pictures()[v], noise(v))] for v in range(VICTIMS)]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    table, again = (direct_look(sent, STATE, x, SLOTS)[0] for x in (images, images[order]))
    torch.testing.assert_close(table[:, order], again, atol=1e-3, rtol=0)


@pytest.mark.parametrize("length", [143, 144, 145, 3000, 3953, 3954, 9001])
def test_windows_equal_a_plain_loop(length):
    draw = torch.Generator().manual_seed(length)
    signal = torch.randn(length, generator=draw, dtype=torch.float64)
    signal[length // 2 :] += 5
    templates = torch.randn(3, 144, generator=draw, dtype=torch.float64)
    templates -= templates.mean(dim=1, keepdim=True)
    templates /= templates.norm(dim=1, keepdim=True)
    largest, places = _windows(signal, templates)
    if length < 144:
        assert not largest.any()
        return
    windows = signal.unfold(0, 144, 1)
    windows = windows - windows.mean(dim=1, keepdim=True)
    expected = (templates @ (windows / windows.norm(dim=1, keepdim=True)).T).abs().max(dim=1)
    torch.testing.assert_close(largest, expected.values, atol=1e-5, rtol=0)
    assert torch.equal(places, expected.indices)


ONE = Slots(SLOTS.batch[:1], SLOTS.label[:1], np.zeros(VICTIMS + STRANGERS - 1, dtype=np.int64))


def test_a_large_update_is_read_in_bounded_work():
    """The beginning of each tensor."""
    images = pictures()
    large = torch.randn(8 * ENOUGH_VALUES, generator=torch.Generator().manual_seed(0))
    large[90_000 : 90_000 + SIZE**2] = images[0].flatten()
    table, sights = direct_look([[{"large": large}]], STATE, images, ONE)
    assert sights[0].tensor == "large"
    assert table[0, 0] > 0.99


def test_of_many_large_tensors_two_images_each_are_read_and_more_of_what_is_no_parameter():
    images, draw = pictures(channels=3)[:], torch.Generator().manual_seed(0)
    state = {f"layer{i}": torch.randn(4000, generator=draw) for i in range(400)}
    assert 400 * 4000 > MOST_VALUES > 400 * 2 * images[0].numel() > ENOUGH_VALUES
    update = {n: torch.randn(t.shape, generator=draw) for n, t in state.items()}
    inside = {**update, "layer7": update["layer7"].clone(), "more": torch.randn(4000, generator=draw)}
    inside["layer7"][400 : 400 + images[0].numel()] = images[0].flatten()
    beside = {**update, "more": torch.randn(4000, generator=draw)}
    beside["more"][3000 : 3000 + images[0].numel()] = images[0].flatten()
    for sent, name in ((inside, "layer7"), (beside, "more")):
        table, sights = direct_look([[sent]], state, images, ONE)
        assert sights[0].tensor == name
        assert table[0, 0] > 0.99
