"""Context parallelism: the ranks of a mesh axis compute one batch together, each a part of every sequence.

`sharing.py` says which part, and who the ranks are. It depends on torch alone; the strategies decide when a batch is divided.
"""
