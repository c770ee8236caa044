"""The weights of a user's model: a safetensors file, or a checkpoint of torch that holds tensors and nothing else."""

import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil.core.errors import UserError, one_line, shape_text
from gradveil.core.types import Tensors
from gradveil.storage.reading import open_regular, shown_path
from gradveil.storage.updates import MAX_BYTES, load_tensors

_INSIDE = ("state_dict", "model_state_dict", "model")  # under which trainers keep a state beside other things
_PREFIXES = ("module.", "_orig_mod.")  # of models that were trained in parallel, or compiled


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Put the weights of a file into the module. Names and shapes must be the module's; one line says what is not."""
    state, loaded = module.state_dict(), _stripped(_read(Path(path)))
    optional = {name for name in state if name.endswith("num_batches_tracked")}
    missing = [name for name in state if name not in loaded and name not in optional]
    extra = [name for name in loaded if name not in state]
    if missing or extra:
        problem = f"has no '{missing[0]}'" if missing else f"has '{extra[0]}', which the model lacks"
        raise UserError(f"{shown_path(Path(path))} {problem}; was it saved from another model?")
    for name, tensor in loaded.items():
        if tensor.shape != state[name].shape:
            shapes = f"{shape_text(tensor.shape)}, the model's is {shape_text(state[name].shape)}"
            raise UserError(f"{shown_path(Path(path))}: '{name}' is {shapes}; was it saved from another model?")
    module.load_state_dict(loaded, strict=False)


def _read(path: Path) -> Tensors:
    with open_regular(path, MAX_BYTES) as file:
        if file.read(4) != b"PK\x03\x04":  # not the archive that torch writes
            return load_tensors(path)[0]
        try:
            with zipfile.ZipFile(file) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
                    raise UserError(f"{shown_path(path)}: larger than {MAX_BYTES:,} bytes when unpacked.")
            file.seek(0)
            content: object = torch.load(file, map_location="cpu", weights_only=True)
        except UserError:
            raise
        except Exception as error:  # a damaged or hostile file may raise anything
            reason = one_line(error).partition(". ")[0]
            alone = f"{shown_path(path)} is no checkpoint of tensors alone ({reason}); save model.state_dict()."
            raise UserError(alone) from None
    for name in _INSIDE:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise UserError(f"{shown_path(path)} holds no state of a model; save model.state_dict().")
    for name, tensor in content.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{shown_path(path)}: tensor '{name}' holds NaN or infinite values.")
    return {str(name): tensor for name, tensor in content.items()}


def _stripped(tensors: Tensors) -> Tensors:
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors
