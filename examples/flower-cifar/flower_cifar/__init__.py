"""A Flower app on CIFAR-10, as one finds it in a tutorial."""
