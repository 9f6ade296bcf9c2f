"""The network test that runs on every node before the trainer starts."""
