"""Trackers of experiments: MLflow, TensorBoard and Weights & Biases, one file each.

A tracker gets the values of `selection` in ascending steps, and tells or remembers how far it is,
so that sending can be repeated. None of them knows a backend or the registry.
"""
