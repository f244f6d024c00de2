"""`profile`: where the time of the steps in a trace of torch.profiler went."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from lightning_mfsdp.profile import break_down, read_trace, report

__all__ = ["add_profile_command"]


def add_profile_command(subparsers: Any) -> None:
    """Add `profile` to a parser."""
    text = "where the time of the steps in a trace of torch.profiler went, and what to try first"
    parser = subparsers.add_parser("profile", help=text, description=text)
    parser.add_argument("trace", metavar="TRACE", help="a file of export_chrome_trace or StepProfile, also compressed")
    parser.add_argument("--json", action="store_true", help="print JSON, in microseconds a step")
    parser.set_defaults(run=_profile)


def _profile(arguments: Namespace) -> int:
    found = break_down(read_trace(arguments.trace))
    text = json.dumps(asdict(found), indent=2) if arguments.json else report(found, arguments.trace)
    sys.stdout.write(f"{text}\n")
    return 0
