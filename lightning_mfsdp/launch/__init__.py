"""How the processes of a run start, connect, exchange failures and stop; the same under the Trainer and under Fabric."""
