"""The NumPy functions underneath: protect what leaves, check what comes in, write down what arrives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as drawn_arrays

from gradveil import attacks, models
from gradveil.core.errors import UserError
from gradveil.core.randomness import SecretStream
from gradveil.core.types import Tensors
from gradveil.defenses import Defense
from gradveil.defenses.base import Step
from gradveil.protection.door import Buffers
from gradveil.protection.flower.arrays import check_arrays, matrices_of_one_row, protect_arrays, save_arrays
from gradveil.storage.updates import load_update

RNG = np.random.default_rng(0)
BEFORE = {
    "w": RNG.normal(size=(20, 10)).astype(np.float32),
    "b": RNG.normal(size=10).astype(np.float32),
    "norm.running_var": np.ones(4, np.float32),
    "norm.num_batches_tracked": np.array(3),
}
AFTER = {
    "norm.num_batches_tracked": np.array(4),
    "b": BEFORE["b"] + RNG.normal(size=10).astype(np.float32),
    "w": BEFORE["w"] + RNG.normal(size=(20, 10)).astype(np.float32),
    "norm.running_var": np.full(4, 0.5, np.float32),
}

floats = st.floats(-1e3, 1e3, width=32)


@given(drawn_arrays(np.float32, (2, 7), elements=floats))
def test_without_a_defense_every_bit_comes_back(values: np.ndarray) -> None:
    found = protect_arrays({"w": values[0]}, {"w": values[1]}, "none")
    assert np.array_equal(found["w"], values[1])


def test_pruning_keeps_the_largest_changes_and_returns_the_rest_to_what_was_received() -> None:
    found = protect_arrays(BEFORE, AFTER, "prune:ratio=0.9")
    change = np.abs(AFTER["w"].astype(float) - BEFORE["w"])
    largest = change >= np.sort(change.ravel())[180]
    assert np.array_equal(found["w"] != BEFORE["w"], largest)
    assert np.allclose(found["w"][largest], AFTER["w"][largest])


def test_clipping_looks_at_the_whole_update() -> None:
    found = protect_arrays(BEFORE, AFTER, "clip:norm=0.5")
    square = sum(float(((found[n].astype(float) - BEFORE[n]) ** 2).sum()) for n in ("w", "b"))
    assert square**0.5 == pytest.approx(0.5, rel=1e-4)


def test_what_no_defense_acts_on_is_withheld_unless_asked_for() -> None:
    held = protect_arrays(BEFORE, AFTER, "gaussian:std=3")
    assert list(held) == list(AFTER)
    for name in ("norm.running_var", "norm.num_batches_tracked"):
        assert np.array_equal(held[name], BEFORE[name])
        assert held[name] is not BEFORE[name]
    assert not np.array_equal(held["b"], AFTER["b"])
    named = protect_arrays(BEFORE, AFTER, "gaussian:std=3", untouched=["b"])
    assert np.array_equal(named["b"], BEFORE["b"])
    update = {"w": np.ones(4, np.float32), "running_mean": np.ones(2, np.float32), "count": np.ones(2, np.int64)}
    assert not protect_arrays({}, update, "none", sends="update")["running_mean"].any()  # in an update: no change
    assert not protect_arrays({}, update, "none", sends="update")["count"].any()


def test_statistics_counters_order_and_kinds_stay() -> None:
    found = protect_arrays(BEFORE, AFTER, "gaussian:std=3", buffers="send")
    assert list(found) == list(AFTER)
    assert {n: (a.dtype, a.shape) for n, a in found.items()} == {n: (a.dtype, a.shape) for n, a in AFTER.items()}
    assert np.array_equal(found["norm.running_var"], AFTER["norm.running_var"])
    assert int(found["norm.num_batches_tracked"]) == 4
    assert not np.array_equal(found["b"], AFTER["b"])
    named = protect_arrays(BEFORE, AFTER, "gaussian:std=3", untouched=["b"], buffers="send")
    assert np.array_equal(named["b"], AFTER["b"])
    assert not np.array_equal(named["norm.running_var"], AFTER["norm.running_var"])


def test_noise_is_new_every_time_unless_a_stream_is_given() -> None:
    one, two = (protect_arrays(BEFORE, AFTER, "gaussian:std=1")["w"] for _ in range(2))
    assert not np.array_equal(one, two)
    streams = (SecretStream(b"five") for _ in range(2))
    one, two = (protect_arrays(BEFORE, AFTER, "gaussian:std=1", rng=rng)["w"] for rng in streams)
    assert np.array_equal(one, two)
    assert float((one - AFTER["w"]).std()) == pytest.approx(1, abs=0.2)


def test_an_update_can_be_sent_as_it_is() -> None:
    update = {"w": np.arange(10, dtype=np.float32)}
    found = protect_arrays({}, update, "prune:ratio=0.5", sends="update")
    assert found["w"].tolist() == [0, 0, 0, 0, 0, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("spec", ["precode", "loda", "mixup", "dcs2", "soteria", "prune+refiner", "ats"])
def test_other_defenses_are_refused_with_the_way_out(spec: str) -> None:
    with pytest.raises(UserError, match="acts on more than the update.*gradveil.flower.protect"):
        protect_arrays(BEFORE, AFTER, spec)


class Curious(Defense):
    """Acts on the update alone, but looks at the model to do it."""

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {name: tensors[name] for name in step.model.trainable}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w": np.full((20, 10), np.nan, np.float32)}, "not finite in 'w'"),
        ({"w": np.zeros((20, 9), np.float32)}, "received as 20×10 and is now 20×9"),
        ({"stranger": np.zeros(2, np.float32)}, "'stranger' was not received"),
        ({"w": AFTER["w"].astype(np.complex64)}, "'w' holds complex64"),
        ({"w": AFTER["w"].astype(object)}, "'w' holds object"),
        ({"norm.running_var": np.full(4, np.nan, np.float32)}, "not finite in 'norm.running_var'"),
        ({"norm.running_var": np.ones(4, np.complex64)}, "'norm.running_var' holds complex64"),
        ({"norm.num_batches_tracked": np.array(["text"])}, "holds <U4"),
        ({"norm.num_batches_tracked": np.zeros(99, np.int64)}, "received as a single number and is now 99"),
        ({"norm.num_batches_tracked": np.array(4, np.uint8)}, "received as int64 and is now uint8"),
        ({"norm.running_var": np.ones(4)}, "received as float32 and is now float64"),
        ({"w": AFTER["w"].astype(">f4")}, "'w' holds >f4"),
        ({"w": AFTER["w"].astype(np.longdouble)}, "'w' holds float128"),
        ({"pixels": np.zeros((8, 8), np.uint8)}, "'pixels' was not received"),
    ],
)
@pytest.mark.parametrize("buffers", ["withhold", "send"])
def test_what_cannot_be_protected_does_not_leave(change: dict[str, np.ndarray], words: str, buffers: Buffers) -> None:
    with pytest.raises(UserError, match=words):
        protect_arrays(BEFORE, {**AFTER, **change}, "prune", buffers=buffers)
    with pytest.raises(UserError, match="asks for the model"):
        protect_arrays(BEFORE, AFTER, Curious())


class Answer(Defense):
    """Returns whatever a test has it return."""

    def __init__(self, answer: Callable[[Tensors], object]):
        self.answer = answer

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return self.answer(tensors)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda t: {}, "returned nothing for 'b'"),
        (lambda t: {"b": t["b"]}, "returned nothing for 'w'"),
        (lambda t: [], "returned list"),
        (lambda t: {**t, "w": t["w"] * float("nan")}, "not finite in 'w'"),
        (lambda t: {**t, "w": t["w"] * 1e300}, "not finite in 'w'"),  # too large for float32
        (lambda t: {**t, "w": t["w"].to(torch.complex64)}, "'w' holds torch.complex64"),
        (lambda t: {**t, "w": t["w"][0]}, "'w' is"),
    ],
)
def test_an_answer_that_is_not_complete_does_not_leave(answer: Callable[[Tensors], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        protect_arrays(BEFORE, AFTER, Answer(answer))


def test_half_precision_that_overflows_does_not_leave() -> None:
    before, after = ({"w": np.full(3, value, np.float16)} for value in (60_000, 60_032))
    with pytest.raises(UserError, match="not finite in 'w'"):
        protect_arrays(before, after, Answer(lambda t: {"w": t["w"] + 9_000}))


def test_a_defense_may_work_in_place() -> None:
    """What it changed is not taken for unchanged."""
    found = protect_arrays(BEFORE, AFTER, Answer(lambda t: {name: value.zero_() for name, value in t.items()}))
    assert np.array_equal(found["w"], BEFORE["w"])
    assert np.array_equal(found["b"], BEFORE["b"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": np.zeros(1)}, "has 'extra'"),
        ({"w": np.zeros((20, 11), np.float32)}, "as 20×11, this client's is 20×10"),
        ({"w": np.zeros((20, 10), np.int64)}, "as int64, not float32"),
        ({"b": np.full(10, np.inf, np.float32)}, "not finite in 'b'"),
        ({"norm.running_var": np.full(4, np.nan, np.float32)}, "not finite in 'norm.running_var'"),
    ],
)
def test_a_model_that_was_not_agreed_on_is_refused(change: dict[str, np.ndarray], words: str) -> None:
    check_arrays(AFTER, BEFORE)
    with pytest.raises(UserError, match=words):
        check_arrays({**BEFORE, **change}, BEFORE)
    with pytest.raises(UserError, match="lacks 'b'"):
        check_arrays({n: a for n, a in BEFORE.items() if n != "b"}, BEFORE)


def test_what_arrived_is_written_as_an_update(tmp_path: Path) -> None:
    path = tmp_path / "update.safetensors"
    written = save_arrays(path, BEFORE, AFTER, examples=9, lr=0.1, input_shape=[1, 4, 5])
    update, facts = load_update(path)
    assert sorted(written) == sorted(update.tensors) == ["b", "w"]
    assert (update.kind, update.examples, facts["lr"], facts["input_shape"]) == ("delta", 9, 0.1, [1, 4, 5])
    assert np.allclose(update.tensors["w"].numpy(), AFTER["w"] - BEFORE["w"])


@pytest.mark.parametrize(("tampering", "layer"), [("fishing", "fc.weight"), ("imprint", "imprint.question.weight")])
def test_layers_that_single_out_images_are_noticed_and_honest_ones_are_not(tampering: str, layer: str) -> None:
    def arrays(model: torch.nn.Module) -> dict[str, np.ndarray]:
        return {name: t.detach().numpy() for name, t in model.state_dict().items()}

    net = models.build("lenet", input_shape=(1, 12, 12), num_classes=3, seed=0)
    assert matrices_of_one_row(arrays(net)) == []
    assert matrices_of_one_row({"fc.weight": np.zeros((3, 4), np.float32)}) == [], "a classifier that starts at zero is honest"
    assert matrices_of_one_row(arrays(attacks.parse(tampering).tamper(net, (1, 12, 12)))) == [layer]
