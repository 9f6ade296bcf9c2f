"""The dimensions of parallelism, and how a model is divided along them."""
