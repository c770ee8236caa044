"""The inputs of single layers during a forward pass."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from gradveil.core.types import Tensors


def layer_inputs(layers: Mapping[str, nn.Module], forward: Callable[[], object]) -> Tensors:
    """The input of each layer while `forward` runs, by the name of the layer, in the order in which the layers run.

    A layer that does not run, or not on one tensor alone, is left out. Of several runs the last one counts.
    """
    inputs: Tensors = {}

    def hook_for(name: str) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def hook(_: nn.Module, arguments: tuple[object, ...]) -> None:
            if len(arguments) == 1 and isinstance(arguments[0], Tensor):
                inputs.pop(name, None)
                inputs[name] = arguments[0]

        return hook

    handles = [layer.register_forward_pre_hook(hook_for(name)) for name, layer in layers.items()]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return inputs
