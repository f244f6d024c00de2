"""Files of a checkpoint, and nothing about models: where they are, how a save keeps the earlier ones until its end, how they are read.

ranks            errors of one rank are raised on all
locate           from a path or URL to a `Location`
location         a save by all ranks, from `begin` to `commit`, and files that are read whole
local, remote    the same on a file system, and behind a URL
shared_folder    whether all ranks see the folder that they write to
write            tensors of a directory are written, by torch.distributed.checkpoint
directory        a directory is opened, and its tensors are read
read             the reader below that
trust            classes in pickles that are loaded, and those that are refused
"""
