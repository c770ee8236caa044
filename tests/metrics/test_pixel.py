import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import mean_squared_error, peak_signal_noise_ratio

from gradveil.metrics import mse, psnr


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 64, 64), (3, 24, 24), (3, 32, 32), (1, 8, 8)])
def test_equals_scikit_image(shape):
    x, y = torch.rand(2, 5, *shape, generator=torch.Generator().manual_seed(0))
    for i in range(5):
        a, b = x[i].numpy().astype(np.float64), y[i].numpy().astype(np.float64)
        assert mse(x, y)[i].item() == pytest.approx(mean_squared_error(a, b), rel=1e-12)
        assert psnr(x, y)[i].item() == pytest.approx(peak_signal_noise_ratio(a, b, data_range=1), rel=1e-12)


def test_known_values():
    x = torch.full((1, 1, 4, 4), 0.5)
    assert psnr(x, x + 0.1).item() == pytest.approx(20, abs=1e-5)
    assert psnr(x, x).item() == pytest.approx(160)  # finite, by the stated floor


def test_pixels_outside_the_range_are_clamped():
    x = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2)
    wild = torch.tensor([-7.0, 9.0]).view(1, 1, 1, 2)
    assert mse(x, wild).item() == 0
    assert mse(wild, x).item() == 0


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="reconstruction"):
        psnr(torch.zeros(2, 1, 4, 4), torch.zeros(1, 1, 4, 4))


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), channels=st.sampled_from([1, 3]), side=st.integers(3, 20))
def test_symmetric_and_falling_with_noise(seed, channels, side):
    stream = torch.Generator().manual_seed(seed)
    x = 0.25 + 0.5 * torch.rand(1, channels, side, side, generator=stream)
    noise = torch.rand(x.shape, generator=stream) - 0.5  # up to half the range: never clamped at the levels below
    values = [psnr(x, x + level * noise).item() for level in (0.05, 0.1, 0.2, 0.4)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == 4
    assert psnr(x, x + noise).item() == psnr(x + noise, x).item()
