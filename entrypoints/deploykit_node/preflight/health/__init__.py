"""The health of this node: what the preflight looks at beside the network.

One file for each kind of check. A check that cannot run says so, and is no fault. All run in a
thread of their own, since a broken disk or driver can make a check wait without end.
"""
