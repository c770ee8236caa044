"""How much of an image a reconstruction reveals: one definition per metric, and one place that applies them."""

from gradveil.metrics.baseline import baseline
from gradveil.metrics.identification import Identification, clopper_pearson, identification_rate, identify, likeness_table
from gradveil.metrics.matching import match
from gradveil.metrics.perceptual import lpips, lpips_size
from gradveil.metrics.pixel import mse, psnr
from gradveil.metrics.scores import Scores, batch_numbers, score_all, summarize
from gradveil.metrics.structural import Window, ssim, ssim_window

__all__ = [
    "Identification",
    "Scores",
    "Window",
    "baseline",
    "batch_numbers",
    "clopper_pearson",
    "identification_rate",
    "identify",
    "likeness_table",
    "lpips",
    "lpips_size",
    "match",
    "mse",
    "psnr",
    "score_all",
    "ssim",
    "ssim_window",
    "summarize",
]
