"""Problems that would stop a job, detected before it is submitted.

Collecting facts (`collect.py`, `local.py`, the Slurm backend's site profile) is separate from
judging them: every `findings` function is a pure function of plain data, so saved facts give the
same findings as live ones. Nothing here imports a backend.
"""
