"""Small convolutional networks: of published attacks, of Flower's tutorial, and a plain one that trains well."""

from __future__ import annotations

from torch import nn

from gradveil.core.settings import settings
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network, classifier_on, kaiming_


def _stages(convolutions: list[nn.Conv2d], pool: type[nn.MaxPool2d] | type[nn.AvgPool2d]) -> dict[str, nn.Module]:
    """Convolution, ReLU and pooling by two, once for each convolution."""
    layers: dict[str, nn.Module] = {}
    for i, convolution in enumerate(convolutions, start=1):
        layers |= {f"conv{i}": convolution, f"relu{i}": nn.ReLU(), f"pool{i}": pool(2)}
    return layers


@MODELS.register("cnn")
@settings
class CNN(Network):
    """Two strided 5×5 ReLU convolutions and a hidden layer; quick to train."""

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


@MODELS.register("flower-cnn")
@settings
class FlowerCNN(Network):
    """The network of Flower's PyTorch tutorial: two 5×5 convolutions with max-pooling, hidden layers of 120 and 84."""

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        layers = _stages([nn.Conv2d(input_shape[0], 6, 5), nn.Conv2d(6, 16, 5)], nn.MaxPool2d)
        return classifier_on(layers, input_shape, num_classes, hidden=[120, 84], name=self.name)


@MODELS.register("convbig")
@settings
class ConvBig(Network):
    """Balunović et al. 2022, on which they break Soteria: two convolutions, hidden layers of 2,000 and 1,000."""

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        # The second kernel is 1×1 with padding 1 in the published code: 32 pixels become 5,184 features.
        convolutions = [nn.Conv2d(input_shape[0], 32, 3, padding=1), nn.Conv2d(32, 64, 1, padding=1)]
        layers = _stages(convolutions, nn.AvgPool2d)
        return classifier_on(layers, input_shape, num_classes, hidden=[2000, 1000], name=self.name)


@MODELS.register("bayes-cnn")
@settings
class BayesCNN(Network):
    """The network of the Bayes-optimal attack (Balunović et al. 2022): two convolutions, a hidden layer of 100."""

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        convolutions = [nn.Conv2d(input_shape[0], 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)]
        layers = _stages(convolutions, nn.AvgPool2d)
        return classifier_on(layers, input_shape, num_classes, hidden=[100], name=self.name)
