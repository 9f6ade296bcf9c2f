"""Components of the reference trainer; the training loop is in ``train.py``."""
