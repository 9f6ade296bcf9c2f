"""Search over the arguments of a job: trials are ordinary runs, chosen by a sampler.

The state of a sweep is its definition, a journal of its trials (Optuna's), and the registry of
runs. The process that holds the lock of the sweep's folder controls it, and may die at any time.
"""
