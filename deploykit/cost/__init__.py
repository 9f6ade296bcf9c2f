"""What a job may cost and what it did cost: prices as data, and decimal arithmetic.

Nothing here knows a backend. Each backend says which machines a job has, for how long, and at which
price (`base.Capabilities.cost`); the sums and the cap are the same for all.
"""
