"""Small convolutional networks: of published attacks, of the Flower tutorial, and a plain one that trains well."""

from collections import OrderedDict
from typing import ClassVar

from torch import nn

from gradveil.core.settings import settings
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network, classifier_on, kaiming_


@MODELS.register("cnn")
@settings
class CNN(Network):
    """Two strided 5×5 ReLU convolutions and a hidden layer; trains fast.

    Example: gradveil audit --model cnn
    """

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        layers = {
            "conv1": nn.Conv2d(input_shape[0], 16, 5, stride=2, padding=2),
            "relu1": nn.ReLU(),
            "conv2": nn.Conv2d(16, 32, 5, stride=2, padding=2),
            "relu2": nn.ReLU(),
        }
        model = classifier_on(layers, input_shape, num_classes, hidden=[24], name=self.name)
        kaiming_(model, nn.Conv2d)
        return model


@MODELS.register("bayes-cnn")
@settings
class BayesCNN(Network):
    """The network of the Bayes-optimal attack (Balunović et al. 2022): two convolutions, a hidden layer of 100.

    A stage is a convolution, ReLU and pooling by two.

    Example: gradveil audit --model bayes-cnn
    """

    convolutions: ClassVar[tuple[tuple[int, int, int], ...]] = ((32, 3, 1), (64, 3, 1))  # channels, kernel, padding
    hidden: ClassVar[tuple[int, ...]] = (100,)
    pool: ClassVar[type[nn.MaxPool2d | nn.AvgPool2d]] = nn.AvgPool2d

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        layers: dict[str, nn.Module] = {}
        channels = input_shape[0]
        for i, (width, kernel, padding) in enumerate(self.convolutions, start=1):
            convolution = nn.Conv2d(channels, width, kernel, padding=padding)
            layers |= {f"conv{i}": convolution, f"relu{i}": nn.ReLU(), f"pool{i}": self.pool(2)}
            channels = width
        return classifier_on(layers, input_shape, num_classes, hidden=self.hidden, name=self.name)


@MODELS.register("convbig")
@settings
class ConvBig(BayesCNN):
    """Balunović et al. 2022, on which they break Soteria: two convolutions, hidden layers of 2,000 and 1,000.

    The second kernel is 1×1 with padding 1 in the published code: images of 32 pixels become 5,184 features.

    Example: gradveil audit --model convbig
    """

    convolutions = ((32, 3, 1), (64, 1, 1))
    hidden = (2000, 1000)


@MODELS.register("flower-cnn")
@settings
class FlowerCNN(BayesCNN):
    """The network of the PyTorch tutorial of Flower: two 5×5 convolutions with max-pooling, hidden layers of 120 and 84.

    Example: gradveil audit --model flower-cnn
    """

    convolutions = ((6, 5, 0), (16, 5, 0))
    hidden = (120, 84)
    pool = nn.MaxPool2d


@MODELS.register("femnist-cnn")
@settings
class FEMNISTCNN(Network):
    """The network for handwriting of Reddi et al. 2021: two 3×3 convolutions, max-pooling, dropout, a hidden layer of 128.

    Example: gradveil audit --model femnist-cnn
    """

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        layers = {
            "conv1": nn.Conv2d(input_shape[0], 32, 3),
            "relu1": nn.ReLU(),
            "conv2": nn.Conv2d(32, 64, 3),
            "relu2": nn.ReLU(),
            "pool": nn.MaxPool2d(2),
            "drop1": nn.Dropout(0.25),
        }
        model = classifier_on(layers, input_shape, num_classes, hidden=[128], name=self.name)
        named = dict(model.named_children())
        head = {"fc1": named.pop("fc1"), "fc1_relu": named.pop("fc1_relu"), "drop2": nn.Dropout(0.5), "fc": named.pop("fc")}
        return nn.Sequential(OrderedDict(named | head))
