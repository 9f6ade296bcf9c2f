"""Parallelism strategies, one per file; each is a variation of ``single.py``."""
