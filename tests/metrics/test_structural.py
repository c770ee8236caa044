import numpy as np
import pytest
import torch
from skimage.metrics import structural_similarity

from gradveil.core.errors import UserError
from gradveil.metrics import ssim, ssim_window

# size → the σ with which scikit-image picks the window stated for it
SIZES = {
    (1, 28, 28): 1.5,
    (1, 64, 64): 1.5,
    (3, 24, 24): 1.5,
    (3, 32, 40): 1.5,
    (1, 11, 11): 1.5,
    (1, 10, 10): 1.5 * 9 / 11,
    (1, 8, 8): 1.5 * 7 / 11,
    (3, 8, 8): 1.5 * 7 / 11,
    (1, 5, 30): 1.5 * 5 / 11,
    (1, 3, 3): 1.5 * 3 / 11,
}


@pytest.mark.parametrize(("shape", "sigma"), SIZES.items())
@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_equals_scikit_image(shape, sigma, noise):
    stream = torch.Generator().manual_seed(0)
    x = torch.rand(4, *shape, generator=stream)
    y = (x + noise * torch.randn(x.shape, generator=stream)).clamp(0, 1)
    values = ssim(x, y)
    for i in range(4):
        expected = structural_similarity(
            x[i].numpy().astype(np.float64),
            y[i].numpy().astype(np.float64),
            data_range=1,
            channel_axis=0,
            gaussian_weights=True,
            sigma=sigma,
            use_sample_covariance=False,
        )
        assert values[i].item() == pytest.approx(expected, abs=1e-9)


def test_smooth_and_flat_images_equal_scikit_image():
    """Where variances vanish, single precision would be visibly off."""
    ramp = torch.linspace(0.4, 0.6, 28).expand(1, 1, 28, 28).contiguous()
    flat = torch.full_like(ramp, 0.9)
    for other in (flat, 1 - ramp):
        expected = structural_similarity(
            ramp[0, 0].numpy().astype(np.float64),
            other[0, 0].numpy().astype(np.float64),
            data_range=1,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
        )
        assert ssim(ramp, other).item() == pytest.approx(expected, abs=1e-9)


def test_an_exact_match_is_one_and_a_negative_is_below_zero():
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(ssim(x, x), torch.ones(2, dtype=torch.float64))
    assert (ssim(x, 1 - x) < -0.5).all()


def test_images_are_clamped():
    x = torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(2)).round()
    assert ssim(x, 5 * x - 2).item() == pytest.approx(1)


def test_the_window_is_stated():
    assert str(ssim_window(28, 28)) == "11×11 Gaussian window, σ 1.5"
    assert str(ssim_window(8, 40)) == "7×7 Gaussian window, σ 0.955"
    with pytest.raises(UserError, match="2×5"):
        ssim_window(2, 5)
