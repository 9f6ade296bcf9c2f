"""The parts of the reference trainer; the loop itself is in ``train.py``."""
