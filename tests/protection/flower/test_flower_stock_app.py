"""The example's app as it is and with its one line changed: what the server captures, and what evaluation says."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gradveil as gv
from gradveil.cli import main
from gradveil.protection.flower import capture
from gradveil.storage.updates import load_update

pytest.importorskip("flwr", reason="the example is a Flower app")

EXAMPLE = Path(__file__).parents[3] / "examples" / "flower-cifar"


def loaded(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """`client_app.py` of both copies; all else of the app is the same file, on the embedded digits."""
    monkeypatch.setenv("FLOWER_CIFAR_DATA", "mnist-5k")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in [n for n in sys.modules if n.partition(".")[0] == "flower_cifar"]:
        monkeypatch.delitem(sys.modules, name)
    copy_of_app = loaded(EXAMPLE / "local.py", "example_local").copy_of_app
    lines = {"stock": None, "protected": "prune:ratio=0.9"}
    return {name: copy_of_app(tmp_path, line) / "flower_cifar" / "client_app.py" for name, line in lines.items()}


class OneNode:
    def get_node_ids(self) -> list[int]:
        return [7]


def test_one_changed_line_protects_what_the_server_captures_and_nothing_else(
    clients: dict[str, Path], message: Callable[..., Any], tmp_path: Path
) -> None:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.serverapp.strategy import FedAvg

    texts = [path.read_text().splitlines() for path in clients.values()]
    changed = [line for line in difflib.ndiff(*texts) if line[:1] in "+-"]
    assert changed == ["- @app.train()", '+ @app.train(mods=[gradveil.flower.mod("prune:ratio=0.9")])']

    message()  # a run to write messages in
    settings = {"images": 20, "batch-size": 10, "local-epochs": 1, "lr": 0.02}
    captured, evaluated = {}, {}
    for name, path in clients.items():
        app = loaded(path, f"client_app_{name}")
        context = Context(1, 7, {"partition-id": 0, "num-partitions": 2}, RecordDict(), dict(settings))
        state = app.network().state_dict()
        strategy = capture(FedAvg(min_train_nodes=1, min_available_nodes=1), tmp_path / name)
        (sent,) = strategy.configure_train(1, ArrayRecord(state), ConfigRecord({"lr": 0.02}), OneNode())
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(5)  # the order of the images
            reply = app.app(sent, context)
        reply.metadata.__dict__["_src_node_id"] = 7
        strategy.aggregate_train(1, [reply])
        update, facts = load_update(tmp_path / name / "round-001" / "client-7.safetensors")
        captured[name] = (torch.cat([t.flatten() for t in update.tensors.values()]), facts)
        asked = Message(RecordDict({"arrays": ArrayRecord(state)}), dst_node_id=7, message_type="evaluate")
        evaluated[name] = dict(app.app(asked, context).content["metrics"])

    (stock, told), (protected, still_told) = captured["stock"], captured["protected"]
    kept = protected != 0
    assert float(kept.double().mean()) == pytest.approx(0.1, abs=0.01)
    assert float((stock != 0).double().mean()) > 0.5
    assert torch.allclose(protected[kept], stock[kept], atol=1e-7)
    assert told["reported"] == still_told["reported"]  # the client's own metrics
    assert evaluated["stock"] == evaluated["protected"]


def test_one_changed_line_protects_by_an_exported_file(
    clients: dict[str, Path], message: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Audited as the app trains; the log says that it acted, and other settings of the run send nothing."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

    app = loaded(clients["stock"], "client_app_audited")
    local = {"local_epochs": 1, "local_batch_size": 10, "local_lr": 0.02, "local_optimizer": "sgd:momentum=0.9"}
    defense, run = "clip:norm=0.005", tmp_path / "run"
    gv.audit("mnist-5k", app.network(), [defense], "linear", victims=2, batch_size=20, **local, out=run, quiet=True)
    file = tmp_path / "protection.json"
    assert main(["export", str(run), "--out", str(file), "--quiet", "--accept-leak"]) == 0
    source = clients["stock"]
    source.write_text(source.read_text().replace("@app.train()", f'@app.train(mods=[gradveil.flower.mod("{file}")])'))
    app = loaded(source, "client_app_by_file")
    message()  # a run to write messages in
    state = app.network().state_dict()

    def reply(**changed: float) -> Any:
        settings = {"images": 20, "batch-size": 10, "local-epochs": 1, "lr": 0.02, **changed}
        context = Context(1, 7, {"partition-id": 0, "num-partitions": 2}, RecordDict(), settings)
        content = RecordDict({"arrays": ArrayRecord(state), "config": ConfigRecord({"server-round": 1})})
        return app.app(Message(content, dst_node_id=7, message_type="train"), context)

    with caplog.at_level("INFO", logger="gradveil"):
        sent = reply().content["arrays"].to_torch_state_dict()
    norm = torch.cat([(sent[n] - t).flatten() for n, t in state.items()]).norm()
    assert float(norm) == pytest.approx(0.005, rel=1e-3)
    (line,) = [text for text in caplog.messages if "acted on" in text]
    assert f"'{defense}' acted on 10 tensors and changed the update by" in line
    assert "audited for weight differences after 2 steps at learning rate 0.02" in line
    refused = reply(**{"local-epochs": 2})
    assert refused.has_error() and "4 local steps, not 2" in refused.error.reason
