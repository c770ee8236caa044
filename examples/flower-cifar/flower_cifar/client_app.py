"""The client: trains the model it is sent on its own images, and sends the new weights back."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import gradveil
from flower_cifar.task import images_of, network, test, train

app = ClientApp()


def setup(message: Message, context: Context):
    """The model as the server sent it, if it is the one agreed on, and this client's images."""
    net = network()
    gradveil.flower.receive(net, message.content["arrays"])
    client, clients = context.node_config["partition-id"], context.node_config["num-partitions"]
    return net, images_of(int(client), int(clients), int(context.run_config["images"]))


@app.train()
def train_round(message: Message, context: Context) -> Message:
    net, images = setup(message, context)
    config = context.run_config
    loss = train(net, images, epochs=config["local-epochs"], batch_size=config["batch-size"], lr=config["lr"])
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(images), "part": context.node_config["partition-id"]})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    net, images = setup(message, context)
    loss, accuracy = test(net, images)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(images)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
