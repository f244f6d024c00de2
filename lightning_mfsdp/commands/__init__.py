"""The command line."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from lightning_mfsdp.commands.checkpoint import add_checkpoint_commands
from lightning_mfsdp.commands.doctor.command import add_doctor_command
from lightning_mfsdp.commands.environment import add_environment_command
from lightning_mfsdp.commands.memory.command import add_memory_command
from lightning_mfsdp.commands.profile import add_profile_command

__all__ = ["build_parser", "main"]


def build_parser() -> ArgumentParser:
    """The parser of all commands; `run` of what it returns is the function to call with it."""
    parser = ArgumentParser(
        prog="lightning-mfsdp",
        description="Tools for checkpoints, for hosts, for plans, for traces, and for reports of defects.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_checkpoint_commands(commands)
    add_environment_command(commands)
    add_doctor_command(commands)
    add_memory_command(commands)
    add_profile_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: `None`: those of the process.

    Returns:
        The exit code: 0; 1 if `checkpoint verify` or `doctor` found problems, or what `memory` estimates does not fit; 2 if a command
        failed, with one line on stderr that says why.
    """
    chosen = build_parser().parse_args(arguments)
    try:
        code: int = chosen.run(chosen)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    return code
