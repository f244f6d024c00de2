"""What users say about sharding and precision: one set of options for the Trainer's strategy and Fabric's, checked once."""
