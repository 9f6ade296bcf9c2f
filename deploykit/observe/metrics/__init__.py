"""Numbers of a training script: readers of what it writes and prints, one file for each format.

A reader knows no backend and needs no library of the format. It takes files or lines and yields
`points.Point`; what it reads is untrusted, may be truncated, and may grow while it is read.
"""
