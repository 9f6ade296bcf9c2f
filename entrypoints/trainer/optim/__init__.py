"""Optimizers, gradients and weights: what happens after the backward pass."""
