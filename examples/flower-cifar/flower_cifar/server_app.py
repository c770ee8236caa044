"""The server: plain FedAvg. `capture` writes down what it sees of every client, as a curious one could."""

from __future__ import annotations

import json
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import gradveil
from flower_cifar.task import OPTIMIZER, about_data, dataset, network, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, data = context.run_config, dataset()
    print(about_data())
    out = Path(str(config["out"])).resolve()
    facts = {"input_shape": list(data.input_shape), "num_classes": data.num_classes}
    facts |= {"mean": data.mean.tolist(), "std": data.std.tolist(), "local_optimizer": OPTIMIZER}
    strategy = gradveil.flower.capture(FedAvg(fraction_evaluate=1.0), out, rounds=[1], run_config=config, **facts)

    def accuracy(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net = network()
        net.load_state_dict(arrays.to_torch_state_dict())
        loss, right = test(net, data.test)
        return MetricRecord({"loss": loss, "accuracy": right})

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(network().state_dict()),
        train_config=ConfigRecord({"lr": config["lr"]}),
        num_rounds=int(config["rounds"]),
        evaluate_fn=accuracy,
    )
    curves = {
        "data": data.name,
        "acc_test": [result.evaluate_metrics_serverapp[r]["accuracy"] for r in sorted(result.evaluate_metrics_serverapp)],
        "acc_clients": [result.evaluate_metrics_clientapp[r]["accuracy"] for r in sorted(result.evaluate_metrics_clientapp)],
    }
    (out / "accuracy.json").write_text(json.dumps(curves, indent=1) + "\n")
    print(f"what the server saw of round 1: {out / 'round-001'}")
