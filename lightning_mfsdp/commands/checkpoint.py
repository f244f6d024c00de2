"""`checkpoint info|verify|consolidate|export|convert`: arguments become calls, results become tables."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch

from lightning_mfsdp import checkpoint
from lightning_mfsdp.base.progress import progress_bar
from lightning_mfsdp.base.tables import readable_bytes
from lightning_mfsdp.checkpoint.tools.convert import consolidate_checkpoint, convert_checkpoint
from lightning_mfsdp.checkpoint.tools.parts import Source
from lightning_mfsdp.checkpoint.tools.summary import summarize
from lightning_mfsdp.checkpoint.tools.verify import verify
from lightning_mfsdp.commands.report import summary_lines, verification_lines, written_lines
from lightning_mfsdp.commands.safetensors_folder import is_safetensors, summarize_folder, verify_folder

__all__ = ["add_checkpoint_commands"]

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_FACTORS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("iB", 1024))
}


def add_checkpoint_commands(subparsers: Any) -> None:
    """Add `checkpoint` and its subcommands to a parser."""
    parser = subparsers.add_parser(
        "checkpoint", help="inspect checkpoints, verify them, and convert them to other formats"
    )
    commands = parser.add_subparsers(required=True, metavar="WHAT")

    info = _command(commands, "info", _info, "what a checkpoint holds; tensors are not read")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument(
        "--largest", type=int, default=10, metavar="N", help="how many of the largest tensors to list (10)"
    )

    check = _command(commands, "verify", _verify, "whether a checkpoint is whole; reads all of it")
    check.add_argument("--fast", action="store_true", help="do not read tensors: files, sizes and places only")

    single = _command(commands, "consolidate", _consolidate, "a sharded directory becomes one file for plain PyTorch")
    single.add_argument("output", type=Path, metavar="OUTPUT", help="file to write; must not exist")

    export = _command(commands, "export", _export, "weights become safetensors files")
    export.add_argument("output", type=Path, metavar="FOLDER", help="folder to write into")
    export.add_argument("--prefix", default="", metavar="model.", help="removed from the start of every name")
    export.add_argument("--max-shard-size", type=_size, default=_size("5GB"), metavar="5GB", help="of one file")
    export.add_argument("--averaged", action="store_true", help="the average that ShardedEMA has saved")
    export.add_argument("--dtype", choices=_DTYPES, help="cast floating-point tensors to it")

    convert = _command(commands, "convert", _convert, "a checkpoint of another program becomes a directory of this one")
    convert.add_argument("output", type=Path, metavar="OUTPUT", help="directory to write; must not exist")
    convert.add_argument(
        "--from", dest="source", choices=get_args(Source), default="auto", help="program that wrote it (auto)"
    )
    convert.add_argument("--model", metavar="KEY", help="where the model is, where several states could be it")
    convert.add_argument("--strip-prefix", default="", metavar="PREFIX", help="removed from every parameter name")
    convert.add_argument("--add-prefix", default="", metavar="PREFIX", help="then prepended to it, such as model.")
    convert.add_argument(
        "--parameters",
        type=Path,
        metavar="FILE",
        help="parameter names, one a line, in the order of the optimizer, for optimizer states that go by number",
    )


def _command(commands: Any, name: str, run: Callable[[Namespace], int], description: str) -> ArgumentParser:
    parser: ArgumentParser = commands.add_parser(name, help=description, description=description)
    parser.add_argument("path", type=Path, metavar="PATH", help="of the checkpoint")
    parser.add_argument("--trust", action="store_true", help="read Python objects that torch.load refuses by default")
    parser.set_defaults(run=run)
    return parser


def _info(arguments: Namespace) -> int:
    if is_safetensors(arguments.path):
        summary = summarize_folder(arguments.path, largest=arguments.largest)
    else:
        summary = summarize(arguments.path, trust=arguments.trust, largest=arguments.largest)
    _write([json.dumps(asdict(summary), indent=2)] if arguments.json else summary_lines(summary))
    return 0


def _verify(arguments: Namespace) -> int:
    with progress_bar("reading") as progress:
        if is_safetensors(arguments.path):
            verification = verify_folder(arguments.path, fast=arguments.fast, progress=progress)
        else:
            verification = verify(arguments.path, fast=arguments.fast, trust=arguments.trust, progress=progress)
    _write(verification_lines(arguments.path, verification))
    return 1 if verification.problems else 0


def _consolidate(arguments: Namespace) -> int:
    with progress_bar("writing") as progress:
        parts = consolidate_checkpoint(arguments.path, arguments.output, trust=arguments.trust, progress=progress)
    _write(written_lines(arguments.output, parts))
    return 0


def _export(arguments: Namespace) -> int:
    with progress_bar("writing") as progress:
        files = checkpoint.export_checkpoint(
            arguments.path,
            arguments.output,
            max_shard_bytes=arguments.max_shard_size,
            dtype=None if arguments.dtype is None else getattr(torch, arguments.dtype),
            prefix=arguments.prefix,
            progress=progress,
            weights_only=False if arguments.trust else None,
            averaged=arguments.averaged,
        )
    _write(f"{file}  {readable_bytes(file.stat().st_size)}" for file in files)
    return 0


def _convert(arguments: Namespace) -> int:
    parameters = None if arguments.parameters is None else arguments.parameters.read_text().split()
    with progress_bar("writing") as progress:
        parts = convert_checkpoint(
            arguments.path,
            arguments.output,
            source=arguments.source,
            model_key=arguments.model,
            parameters=parameters,
            strip_prefix=arguments.strip_prefix,
            add_prefix=arguments.add_prefix,
            trust=arguments.trust,
            progress=progress,
        )
    _write(written_lines(arguments.output, parts))
    return 0


def _size(text: str) -> int:
    """Bytes of "5GB", "512MiB" or "1000"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text)
    if match is None or match[2] not in _FACTORS:
        raise ArgumentTypeError(f"expected a size such as 5GB or 512MiB, got {text!r}")
    return int(float(match[1]) * _FACTORS[match[2]])


def _write(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
