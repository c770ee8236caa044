"""The data sets that have a name: what they hold, how published work normalizes them, where their files are."""

from dataclasses import dataclass
from pathlib import Path

from gradveil.core.errors import UserError
from gradveil.data.raw import Options, Raw
from gradveil.data.readers import embedded, read_folder, reader_of
from gradveil.storage.data_folder import FOLDER, data_folder

_MNIST = ((0.13066,), (0.30811,))
_FASHION = ((0.1307,), (0.3081,))  # ATS uses the constants of MNIST
_CIFAR10 = ((0.49147, 0.48226, 0.44677), (0.24703, 0.24349, 0.26159))
_CIFAR100 = ((0.50716, 0.48669, 0.44120), (0.26733, 0.25644, 0.27615))
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class NamedSet:
    """A data set with a name.

    Args:
        images: number of images in the published training part; a folder may hold fewer.
        normalization: mean and standard deviation per channel in published work; None: measured on the public part.
        files: what the folder of the set must hold, for messages.
        size: side of the images unless the user asks for another one; None: as stored.
    """

    name: str
    description: str
    images: int
    num_classes: int
    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None
    files: str
    class_names: tuple[str, ...] | None = None
    size: int | None = None

    def folder(self) -> Path | None:
        return data_folder(self.name)

    def available(self) -> bool:
        if self is EMBEDDED:
            return embedded.available()
        folder = self.folder()
        return folder is not None and reader_of(folder) is not None

    def read(self, options: Options) -> Raw:
        if self is EMBEDDED:
            return embedded.read(options)
        folder = self.folder()
        if folder is None:
            raise UserError(f"{self.name} is read from the folder that {FOLDER} names, which is not set; mnist-5k needs none.")
        if not folder.is_dir():
            raise UserError(f"{self.name}: no folder {folder}; create it and add {self.files}.")
        return read_folder(folder, options, expected=f"{self.files}, or an .npz file")


_IDX = "the four idx files of the publisher"
_CIFAR_FILES = "the binary version (cifar-10-batches-bin/ or cifar-100-binary/)"
_MAT = "train_32x32.mat and test_32x32.mat"
_CELEBA = "img_align_celeba/ and list_attr_celeba.txt"
_FACES = "faces of 40 people, 64×64 grey; split=person keeps people apart"
_TINY = "photographs, 32×32 colour (size=64 for the originals), 200 classes"
_SCANS = "X-ray, CT and MR pictures, 64×64 grey, 6 classes"
_CELEBRITIES = "faces, 32×32 colour (size=N for others), label: attribute=Male"
EMBEDDED = NamedSet("mnist-5k", "5,000 MNIST digits, 28×28 grey, 10 classes; built in", 5_000, 10, _MNIST, "nothing", _DIGITS)
_SETS = (
    EMBEDDED,
    NamedSet("mnist", "handwritten digits, 28×28 grey, 10 classes", 60_000, 10, _MNIST, _IDX, _DIGITS),
    NamedSet("fashion-mnist", "pieces of clothing, 28×28 grey, 10 classes", 60_000, 10, _FASHION, _IDX, _CLOTHES),
    NamedSet("cifar10", "small photographs, 32×32 colour, 10 classes", 50_000, 10, _CIFAR10, _CIFAR_FILES, _OBJECTS),
    NamedSet("cifar100", "small photographs, 32×32 colour, 100 classes", 50_000, 100, _CIFAR100, _CIFAR_FILES),
    NamedSet("svhn", "house numbers, 32×32 colour, 10 classes", 73_257, 10, None, _MAT, _DIGITS),
    NamedSet("tinyimagenet", _TINY, 100_000, 200, _IMAGENET, "tiny-imagenet-200/", size=32),
    NamedSet("olivetti", _FACES, 400, 40, None, "an .npz file"),
    NamedSet("mednist", _SCANS, 58_954, 6, None, "one folder of pictures per class"),
    NamedSet("celeba", _CELEBRITIES, 162_770, 2, _HALF, _CELEBA, size=32),
)
NAMED_SETS = {named.name: named for named in _SETS}
