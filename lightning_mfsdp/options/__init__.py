"""What users specify about sharding and precision: one set of options for the Trainer's strategy and Fabric's, checked once."""
