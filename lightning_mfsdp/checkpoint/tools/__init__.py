"""Checkpoints in one process, without a sharded model.

leaves     a directory or a file as leaves by path; tensors are not read
deepspeed  the same for what DeepSpeed writes
opened     any of them
parts      model and optimizers among these leaves, of checkpoints of any program
load       all of it as the dictionary that one file would hold
convert    written as a directory, or as one file
summary    what it holds
verify     whether all of it is there and undamaged
"""
