"""`python -m lightning_mfsdp`: tools for checkpoints outside of training."""

import sys

from lightning_mfsdp.commands import main

if __name__ == "__main__":
    sys.exit(main())
