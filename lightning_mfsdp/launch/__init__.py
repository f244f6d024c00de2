"""How the processes of a run start, connect, hear of each other and stop; the same under the Trainer and under Fabric."""
