"""`python -m lightning_mfsdp`, which is `lightning-mfsdp` too: tools for checkpoints, for hosts, and for reports of defects."""

import sys

from lightning_mfsdp.commands import main

if __name__ == "__main__":
    sys.exit(main())
