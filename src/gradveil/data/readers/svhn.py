"""SVHN, cropped digits: MATLAB files with `X` (32 × 32 × 3 × n bytes) and `y` (digits; 10 stands for zero)."""

import math
import zlib
from pathlib import Path

import numpy as np

from gradveil.core.errors import UserError, one_line, shape_text
from gradveil.data.raw import MAX_BYTES, Images, Options, Raw, checked


def claims(folder: Path) -> bool:
    return (folder / "train_32x32.mat").is_file()


def read(folder: Path, options: Options) -> Raw:
    test = folder / "test_32x32.mat"
    return Raw(_mat(folder / "train_32x32.mat"), _mat(test) if test.is_file() else None)


def _mat(path: Path) -> Images:
    from scipy.io import loadmat, whosmat
    from scipy.io.matlab import MatReadError

    try:
        shapes = {name: shape for name, shape, _ in whosmat(path)}  # from the headers alone
        if not {"X", "y"} <= shapes.keys():
            raise UserError(f"{path}: needs the variables X and y; is the file cut off?")
        if len(shapes["X"]) != 4 or math.prod(shapes["X"]) > MAX_BYTES or math.prod(shapes["y"]) != shapes["X"][3]:
            raise UserError(f"{path}: X is {shape_text(shapes['X'])}, y {shape_text(shapes['y'])}; these do not fit.")
        content = loadmat(path, variable_names=["X", "y"])
    except (OSError, ValueError, TypeError, NotImplementedError, MatReadError, zlib.error) as error:
        raise UserError(f"{path}: not a readable MATLAB file ({one_line(error)}).") from None
    digits = np.asarray(content["y"]).reshape(-1)
    return checked(np.asarray(content["X"]).transpose(3, 0, 1, 2), np.where(digits == 10, 0, digits), str(path))
