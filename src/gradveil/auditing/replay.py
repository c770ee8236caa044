"""The rounds that a real Flower app ran, as settings of audits: their models, and the local training of its clients.

`gradveil.flower.capture` wrote them. The private images of those rounds are not in it, so victims are simulated from the
user's own data: same model, same weights, same local training.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from gradveil.auditing.captured import TRAINING_FACTS, CapturedSpec
from gradveil.core.errors import UserError, shown
from gradveil.core.settings import first_error
from gradveil.storage.reading import parse_json
from gradveil.storage.tensor_file import open_tensors
from gradveil.storage.updates import MAX_BYTES, MAX_FACT

BEFORE = "before.safetensors"
MOST_IMAGES = 16  # of a simulated victim, unless the user asks for more: an update of fewer images leaks more
_OPTIONS = {"lr": "local_lr"}  # names of facts that differ from those of an audit


def replayed_rounds(folder: Path, options: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The settings of one audit per captured round, by the name of the round. What options say replaces what was captured."""
    rounds = [folder] if (folder / BEFORE).is_file() else sorted(p.parent for p in folder.glob(f"round-*/{BEFORE}"))
    if not rounds:
        raise UserError(f"{folder} holds no captured round (round-001/{BEFORE}); gradveil.flower.capture writes them.")
    return {place.name: {**_settings(place, options), **options} for place in rounds}


def _settings(place: Path, options: Mapping[str, object]) -> dict[str, object]:
    clients = sorted(place.glob("client-*.safetensors"))
    if not clients:
        raise UserError(f"{place} holds no update of a client, so nothing is known of the training; capture it again.")
    trainings, examples = [], []
    for client in clients:
        facts = _facts(client)
        examples.append(facts.pop("examples"))
        trainings.append({_OPTIONS.get(n, n): v for n, v in facts.items()})
    for name in dict.fromkeys(name for training in trainings for name in training):
        values = {shown(training.get(name)) for training in trainings}
        if len(values) > 1 and name not in options:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{place}: clients trained with different {name} ({', '.join(sorted(values))}); give {option}.")
    if "local_lr" not in {**trainings[0], **options}:
        raise UserError(f"{place}: the capture does not say the learning rate; give --local-lr.")
    images = min(int(str(number)) for number in examples)
    return {"weights": str(place / BEFORE), "batch_size": min(images, MOST_IMAGES), **trainings[0]}


def _facts(client: Path) -> dict[str, object]:
    """What the file of an update says of the local training behind it, checked, and how many images it comes from."""
    with open_tensors(client, MAX_BYTES) as file:
        metadata = dict(file.metadata)
    told = {name: parse_json(metadata[name], f"{client}: {name}", MAX_FACT) for name in TRAINING_FACTS if name in metadata}
    examples = metadata.get("examples", "1")
    if not examples.isdecimal() or not 0 < int(examples[:9]) < 10**6:
        raise UserError(f"{client}: 'examples' is {shown(examples)}, not a number of images.")
    try:
        CapturedSpec.model_validate(told)
    except ValidationError as error:
        raise UserError(f"{client}: {first_error(error)}") from None
    return {name: value for name, value in told.items() if value is not None} | {"examples": int(examples)}
