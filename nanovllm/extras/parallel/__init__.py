"""One model on several devices: each rank is a process that computes its share.

Read `communicator.py` first: what ranks say to each other.
"""
