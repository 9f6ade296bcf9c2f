"""Why a run failed, determined from its logs: rules as data, and one pass over each log.

Only lines that hold a literal of some rule are matched, so that large logs are cheap; memory does
not grow with the size of a log.
"""
