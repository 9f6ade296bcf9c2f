"""The node plane: what runs on the nodes of a job, around the user's program.

It travels in every bundle, runs on Python 3.10 or later with nothing but the standard library and
torch, and never imports deploykit. `launch.py`, beside this package, starts its programs.
"""

import os

LAUNCH = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "launch.py")
"""The program that starts every other one, beside this copy of the package."""
