"""Units, their weights and gradients, what modules and optimizers are shown of them, and the order of a step."""
