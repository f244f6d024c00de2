"""LightningCLI: everything from a YAML file, any of it overridden on the command line.

For example:

    python examples/cli.py fit --config examples/configs/cpu.yaml
    python examples/cli.py fit --config examples/configs/one_node.yaml --trainer.devices 4
    python examples/cli.py fit --config examples/configs/cpu.yaml --print_config
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a script, only this file's folder is on the path; the package and the other examples lie one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning.pytorch.cli import LightningCLI

import lightning_mfsdp  # noqa: F401 - so that a file may also say `strategy: mfsdp`
from examples.lightning_decoder import LightningDecoder, TextDataModule
from examples.reporting import hide_spurious_warnings


def main() -> None:
    """Parse the command line and run."""
    hide_spurious_warnings()
    LightningCLI(LightningDecoder, TextDataModule, seed_everything_default=0, save_config_callback=None)


if __name__ == "__main__":
    main()
