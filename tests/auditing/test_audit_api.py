"""`gradveil.audit` on a user's own objects."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import gradveil as gv
from gradveil.defenses import parse


@pytest.fixture(scope="module")
def pictures():
    """250 colour images of 24 × 24 pixels in five classes."""
    random = torch.Generator().manual_seed(0)
    x = nn.functional.interpolate(torch.rand(250, 3, 6, 6, generator=random), scale_factor=4)
    return TensorDataset(x, torch.arange(250) % 5)


@pytest.fixture
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 5, stride=2, padding=2), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Dropout(0.5)),
            *(nn.Flatten(), nn.Linear(8 * 144, 5)),
        )


def test_a_module_with_batch_norm_and_dropout_on_a_dataset(pictures, net):
    before = {n: t.clone() for n, t in net.state_dict().items()}
    settings = {"victims": 2, "num_classes": 5, "quiet": True}
    report = gv.audit(pictures, net, [parse("prune:ratio=0.9"), "clip"], "ig:steps=30", **settings)
    assert report.summary.case.input_shape == (3, 24, 24) and report.summary.case.num_classes == 5
    assert report.summary.case.model.startswith("Sequential@")
    frame = report.to_frame()
    assert list(frame["defense"]) == ["none", "prune", "clip"]  # an object is named by what differs from its defaults
    assert set(frame["status"]) == {"ok"}
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    folder = report.folder
    assert folder.is_dir()
    del report
    assert not folder.exists()  # private images do not stay behind


def test_the_same_call_gives_the_same_numbers_and_a_copy_can_be_kept(pictures, net, tmp_path):
    settings = {"defenses": "gaussian", "attacks": "ig:steps=10", "victims": 2, "quiet": True}
    first, second = (gv.audit((pictures.tensors[0], pictures.tensors[1]), net, **settings) for _ in range(2))
    drop = ["seconds"]
    assert first.to_frame().drop(columns=drop).equals(second.to_frame().drop(columns=drop))
    first.save(tmp_path / "kept")
    assert gv.Report.load(tmp_path / "kept").summary == first.summary


def test_a_network_that_does_not_fit_the_classes_is_refused(pictures):
    wrong = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 7))
    with pytest.raises(gv.UserError, match="2×7 for two images, the data has 5 classes"):
        gv.audit(pictures, wrong, quiet=True)


def test_importing_the_package_loads_nothing_slow_and_audit_stays_callable(command_environment):
    code = (
        "import sys, gradveil; assert 'torch' not in sys.modules and 'rich' not in sys.modules;"
        "import gradveil.auditing.spec; assert callable(gradveil.audit); assert gradveil.__version__ == '0.2.0';"
        "assert {'audit', 'compare', 'protect', 'attack_update', 'Defense'} <= set(dir(gradveil))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=command_environment)
