"""The node plane: what runs on the nodes of a job, around the user's program.

It travels in every bundle, runs on Python 3.10 or later with nothing but the standard library and
torch, and never imports deploykit. `launch.py`, beside this package, starts its programs.
"""
