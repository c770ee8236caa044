"""Protection in real use: a training loop, a data set, a Flower client."""
