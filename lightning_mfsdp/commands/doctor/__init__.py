"""`lightning-mfsdp doctor`: what is wrong with the hosts of a run, between them, and with the storage of its checkpoints."""
