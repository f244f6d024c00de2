"""`python -m lightning_mfsdp`: what is done with checkpoints outside of training."""

import sys

from lightning_mfsdp.commands import main

if __name__ == "__main__":
    sys.exit(main())
