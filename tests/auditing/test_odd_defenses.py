"""Defenses that send odd updates: what the catalogue says about them is true, and audits do not license them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from gradveil.auditing.case import Case
from gradveil.auditing.spec import make_spec
from gradveil.client import prepare_client
from gradveil.core.types import Batch, Tensors
from gradveil.data import DataSet
from gradveil.defenses.base import Setup


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("odd_defenses")


def _case(data: DataSet) -> Case:
    return Case(make_spec({"data": data, "model": "lenet", "defenses": "none", "victims": 2, "seed": 1}))


def _sent(benchmark: ModuleType, case: Case, name: str, batches: list[Batch]) -> list[Tensors]:
    """The updates of these batches, one after the other, by one client."""
    defense = benchmark.Odd(name)
    task, state = case.task(defense)
    client = prepare_client(defense, case.training, Setup(task, state, case.data.private, case.public, 1))
    return [client.round(state, batch, 0, 0)[0].tensors for batch in batches]


def test_updates_that_hold_nothing_do_not_depend_on_the_image(
    benchmark: ModuleType, shapes: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("odd_gradients"), "PAUSE", 0.0)
    case = _case(shapes)
    one = case.batch(0)
    other = Batch(1 - one.x, one.y)
    depends = set()
    for name in benchmark.ENTRIES:
        (ours,), (theirs,) = (_sent(benchmark, case, name, [batch]) for batch in (one, other))
        if not all(torch.equal(ours[n].nan_to_num(), theirs[n].nan_to_num()) for n in ours):
            depends.add(name)
    nothing = {name for name, entry in benchmark.ENTRIES.items() if entry.truth == "nothing"}
    assert nothing & depends == {"secret-mask"}  # a secret key that is used once hides the image
    assert len(benchmark.ENTRIES) >= 30 and len(nothing) >= 5
    later = {"every-second", "delayed"}  # nothing in the first call
    assert {n for n, e in benchmark.ENTRIES.items() if e.truth == "decodable"} - depends - later <= {"one-class"}


def test_images_can_be_decoded_by_who_knows_the_code(benchmark: ModuleType, shapes: DataSet) -> None:
    case = _case(shapes)
    batches = [case.batch(0), case.batch(1)]
    image = batches[0].x.flatten()

    def sent(name: str) -> Tensors:
        return _sent(benchmark, case, name, batches[:1])[0]

    count = len(image)
    host, second = sorted(sent("half"), key=lambda name: -sent("half")[name].numel())[:2]
    words = sent("eight-low-bits")[host].flatten()[:count].view(torch.int32)
    assert torch.allclose((words & 255).float() / 255, image, atol=0.01)
    pair = sent("difference")
    assert torch.allclose(pair[second].flatten()[:count] - pair[host].flatten()[:count], image, atol=1e-4)
    wide = sent("low-bits-of-double")[host].flatten()[:count]
    assert torch.allclose((wide - wide.float().double()).float() / 1e-13, image, atol=0.01)
    plain, large = sent("double"), sent("constant-large")
    assert all(torch.allclose(large[n] - 1e9, plain[n], atol=1e-6) for n in plain)
    first, again = _sent(benchmark, case, "delayed", batches)
    assert all(torch.equal(again[n], sent("double")[n].float()) for n in again)
    assert not any(torch.equal(first[n], again[n]) for n in again)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("factor-small", "leaks"),
        ("negative", "leaks"),
        ("double", "leaks"),
        ("every-second", "leaks"),
        ("one-nan", "cannot tell"),
        ("zero", "cannot tell"),
        ("noise-alone", "unrefuted"),
        ("label-alone", "unrefuted"),
        ("stranger", "unrefuted"),
    ],
)
def test_audits_of_a_net_that_sends_its_input_tell_them_apart(
    benchmark: ModuleType, shapes: DataSet, tmp_path_factory: pytest.TempPathFactory, name: str, verdict: str
) -> None:
    height, width = shapes.input_shape[1:]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(height * width * shapes.input_shape[0], shapes.num_classes))
    settings = {"data": shapes, "model": net, "attacks": ["linear"], "victims": 8, "seed": 100}
    folder = tmp_path_factory.getbasetemp() / "odd"  # one for all, so that the control is computed once
    part = benchmark.audit(name, folder, settings)
    assert part["verdict"] == verdict, part
    text = "\n".join(benchmark.page({name: part}))
    assert f"| {name} | {benchmark.ENTRIES[name].does} | {benchmark.ENTRIES[name].truth} | {verdict} |" in text
