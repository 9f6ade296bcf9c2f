"""Why a run failed, read from its logs: rules as data, and one pass over each log.

Of a log only the lines that hold a fixed text of some rule are looked at, so that a large one costs
little; memory does not grow with it.
"""
