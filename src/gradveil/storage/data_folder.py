"""Where the files of data sets with a name lie: below the folder that GRADVEIL_DATA names."""

import os
from pathlib import Path

FOLDER = "GRADVEIL_DATA"


def data_folder(name: str) -> Path | None:
    """The folder of one data set, which may not exist; `fashion-mnist` may also be spelled with an underscore."""
    root = os.environ.get(FOLDER)
    if not root:
        return None
    spellings = [Path(root) / name, Path(root) / name.replace("-", "_")]
    return next((path for path in spellings if path.is_dir()), spellings[0])
