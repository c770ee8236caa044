"""What attacks ask of a network: its fully connected layers, the gradients of its classifier, whether it is smooth."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradveil.core.kernels import plain_kernels
from gradveil.core.observation import Observation
from gradveil.core.randomness import torch_stream
from gradveil.core.task import Task
from gradveil.core.types import Tensors


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks that are removed at the end of the block."""
    kept = list(handles)
    try:
        yield
    finally:
        for handle in kept:
            handle.remove()


def probe(observation: Observation, handles: Iterable[RemovableHandle], images: Tensor | None = None) -> Tensor:
    """The network's outputs for two images, black ones unless others are given; the hooks are removed then."""
    model = observation.model
    images = torch.zeros(2, *observation.task.input_shape) if images is None else images
    images = images.to(next(iter(observation.state.values())).dtype)
    with torch.no_grad(), hooked(handles):
        outputs: Tensor = model(observation.state, images, model.draw_noise(len(images), torch_stream(0)))
    return outputs


def noting_inputs(layers: Mapping[str, nn.Module], inputs: Tensors) -> Iterator[RemovableHandle]:
    """Hooks that put what each layer takes into `inputs`, in the order in which the forward pass meets the layers."""

    def note(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, arguments: inputs.update({path: arguments[0].detach()} if path not in inputs else {})

    return (layer.register_forward_pre_hook(note(path)) for path, layer in layers.items())


def linear_layers(observation: Observation) -> list[str]:
    """Linear layers with a bias that take part in the update, in the order in which the forward pass meets them."""
    model, order = observation.model, list[str]()

    def note(path: str) -> Callable[..., None]:
        return lambda *_: order.append(path)

    layers = [(p, m) for p, m in model.module.named_modules() if isinstance(m, nn.Linear)]
    used = [(p, m) for p, m in layers if f"{p}.weight" in model.trainable and f"{p}.bias" in model.trainable]
    probe(observation, (m.register_forward_pre_hook(note(p)) for p, m in used))
    return order


def takes_one_row_per_image(observation: Observation, layer: str) -> bool:
    """Whether the forward pass meets the layer once, with one vector per image."""
    shapes = list[int]()

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        shapes.append(inputs[0].ndim)

    probe(observation, [observation.model.module.get_submodule(layer).register_forward_pre_hook(note)])
    return shapes == [2]


def pools_all_places(task: Task) -> bool:
    """Whether the first fully connected layer takes one number per channel of the layers before it."""
    module, maps, widths = task.model.module, list[int](), list[int]()

    def note(part: nn.Module, _: tuple[Tensor, ...], output: object) -> None:
        if isinstance(part, nn.Linear):
            widths.append(part.in_features)
        elif isinstance(output, Tensor) and output.ndim == 4 and not widths:
            maps.append(output.shape[1])

    leaves = [part for part in module.modules() if not any(part.children())]
    images = torch.zeros(2, *task.input_shape, dtype=next(module.parameters()).dtype)
    with torch.no_grad(), plain_kernels(), hooked(part.register_forward_hook(note) for part in leaves):
        module(images)
    return bool(maps and widths) and maps[-1] == widths[0]


def classifier_name(observation: Observation) -> str | None:
    """The last linear layer with one output per class."""
    outputs = observation.task.num_outputs
    linear = [(path, m) for path, m in observation.model.module.named_modules() if isinstance(m, nn.Linear)]
    return next((path for path, m in reversed(linear) if m.out_features == outputs), None)


def classifier_gradients(observation: Observation) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias gradient of the classifier, up to their size; of a weight delta its negative."""
    path, sign = classifier_name(observation), 1.0 if observation.update.kind == "gradient" else -1.0
    prefix = f"{path}." if path else ""
    weight, bias = (observation.update.tensors.get(f"{prefix}{part}") for part in ("weight", "bias"))
    return (None if weight is None else sign * weight, None if bias is None else sign * bias)


def is_smooth(module: nn.Module) -> bool:
    """Whether all the activations that the model shows are smooth ones."""
    parts = list(module.modules())
    called = [m.activation for m in parts if isinstance(m, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))]
    kinked = any(isinstance(m, (nn.ReLU, nn.LeakyReLU, nn.MaxPool2d, nn.AdaptiveMaxPool2d)) for m in parts)
    if kinked or nn.functional.relu in called:
        return False
    smooth = (nn.Sigmoid, nn.Tanh, nn.Softplus, nn.GELU, nn.SiLU, nn.ELU)
    return nn.functional.gelu in called or any(isinstance(m, smooth) for m in parts)
