"""One model on several devices: each rank is a process that computes its share.

Read `communicator.py` first: it defines how ranks exchange tensors.
"""
