"""Paths, programs, text: no word of jobs."""
