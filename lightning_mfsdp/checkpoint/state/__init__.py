"""What is saved and loaded of a sharded model, in the order in which a load needs it.

index              parameters by name and by memory; one `ParameterIndex` for a save or load
dcp_shard          what a rank holds of a tensor, as torch.distributed.checkpoint takes it
state_dict         rows, tied weights and versions of a state dict; names and shapes compared
on_disk            what a directory holds, as dictionaries whose tensors are read on request
translation        names that have changed since, and entries to leave out
model              a state dict is loaded into a model
optimizer          the same for an optimizer, and what is saved of it
parameter_state    the same for other tensors kept for parameters, such as averages
full_state         whole tensors instead, on one rank, for checkpoints in one file
"""
