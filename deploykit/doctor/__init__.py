"""What would stop a job, found before it is sent: facts are collected, then judged.

Collecting (`aws/ask.py`, `machine.py`, the Slurm backend's `site.py`) and judging are apart: every
check is a pure function of plain facts, so that saved facts give the same findings as live ones.
"""
