"""`memory`: arguments become rehearsals, and estimates become a table."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from lightning_mfsdp.base.tables import table_lines
from lightning_mfsdp.engine import MixedPrecisionPolicy
from lightning_mfsdp.estimate import (
    OPTIMIZERS,
    MemoryEstimate,
    Rehearsal,
    Subject,
    huggingface_subject,
    lightning_subject,
    rehearse,
)
from lightning_mfsdp.options.dtypes import PrecisionName
from lightning_mfsdp.options.strategy_options import REGISTERED, TrainerOptions

__all__ = ["add_memory_command"]

_GIB = 2**30
# What no operation shows: the CUDA context, NCCL's and cuBLAS's buffers, and what PyTorch's allocator reserves beyond what is allocated.
_RESERVE_BYTES, _RESERVE_FRACTION = 3 * _GIB, 0.05
_GRAD_COMM_DTYPES = ("float32", "bfloat16")
_MUCH_PADDING = 0.05
_LONG_SEQUENCE = 8192


def add_memory_command(subparsers: Any) -> None:
    """Add `memory` to a parser."""
    text = "how many GiB of each GPU a training step takes, by kind, and what makes it fit; needs no GPU"
    parser: ArgumentParser = subparsers.add_parser("memory", help=text, description=text)
    parser.add_argument(
        "model",
        metavar="CONFIG",
        help="a config.json of transformers, or its folder; or package.module:LightningModule",
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="of the whole run")
    parser.add_argument("--gib", type=float, default=80.0, metavar="GIB", help="of each GPU (80)")
    parser.add_argument(
        "--reserve", type=float, metavar="GIB", help="for what is not counted (3, and 5 %% of the rest)"
    )

    step = parser.add_argument_group("the step")
    step.add_argument("--micro-batch", type=int, metavar="B", help="sequences of a microbatch, of a config.json (1)")
    step.add_argument("--sequence", type=int, metavar="S", help="tokens of a sequence, of a config.json (4096)")
    step.add_argument("--batch", metavar="TEXT", help='of a LightningModule, such as "int64[4,129] int64[4]"')
    step.add_argument(
        "--config", type=Path, metavar="FILE", help="of LightningCLI: the module's arguments, strategy, precision"
    )
    step.add_argument(
        "--optimizer", choices=OPTIMIZERS, help="of a config.json (adamw), or instead of the module's own"
    )
    step.add_argument("--accumulate", type=int, metavar="N", help="microbatches of a step (accumulate_grad_batches, 1)")
    step.add_argument("--precision", choices=get_args(PrecisionName), help="of the Trainer (bf16-mixed)")
    step.add_argument("--grad-comm-dtype", choices=_GRAD_COMM_DTYPES, help="of gradients that are sent (float32)")

    strategy = parser.add_argument_group("options of MFSDPStrategy")
    strategy.add_argument("--sharding", choices=("no_shard", "optim", "optim_grads", "optim_grads_params"))
    strategy.add_argument("--outer-sharding", choices=("no_shard", "optim"))
    for axis in ("outer", "context", "tensor", "expert"):
        strategy.add_argument(f"--{axis}", type=int, metavar="N", help=f"ranks along the {axis} axis (1)")
    strategy.add_argument("--sequence-parallel", action="store_true", default=None)
    strategy.add_argument("--offload", choices=("optimizer",))
    strategy.add_argument("--free-gradients", action="store_true", default=None)
    strategy.add_argument("--recompute", action="store_true", help="activations of all layers")
    strategy.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other option; the value is JSON, or a word",
    )

    parser.add_argument("--quick", action="store_true", help="only what was asked for: no comparison, no search")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A subject and a run that can be rehearsed, and what of a GPU is reserved."""

    arguments: Namespace
    content: Mapping[str, Any]
    run: Rehearsal

    def subject(self) -> Subject:
        given = self.arguments
        if ":" in given.model:
            section = self.content.get("model") or {}
            section = section.get("init_args", {}) if "class_path" in section else section
            return lightning_subject(given.model, section, batch=given.batch, optimizer=given.optimizer)
        return huggingface_subject(
            Path(given.model),
            micro_batch=given.micro_batch or 1,
            sequence=given.sequence or 4096,
            optimizer=given.optimizer or "adamw",
        )

    @property
    def accumulates(self) -> bool:
        """Whether a step has several microbatches, as far as is known: `global_batch_size` sets their number when the loaders are made."""
        trainer = self.content.get("trainer") or {}
        number = self.arguments.accumulate or trainer.get("accumulate_grad_batches") or 1
        return number != 1 or self.run.options.global_batch_size is not None

    def estimate(self, what: str) -> MemoryEstimate:
        """What two microbatches hold if there are more: the second and those behind it add to what the first has left."""
        subject = self.subject()

        def build() -> nn.Module:
            module = subject.build()
            sys.stderr.write(f"{what}: two steps of {sum(p.numel() for p in module.parameters()):,} parameters\n")
            return module

        return rehearse(replace(subject, build=build), replace(self.run, microbatches=2 if self.accumulates else 1))

    def reserve_bytes(self, estimate: MemoryEstimate) -> int:
        given: float | None = self.arguments.reserve
        return int(_RESERVE_BYTES + _RESERVE_FRACTION * estimate.total) if given is None else int(given * _GIB)

    def total_bytes(self, estimate: MemoryEstimate) -> int:
        return estimate.total + self.reserve_bytes(estimate)

    def total_gib(self, estimate: MemoryEstimate) -> float:
        return self.total_bytes(estimate) / _GIB

    def fits(self, estimate: MemoryEstimate) -> bool:
        gib: float = self.arguments.gib
        return self.total_gib(estimate) <= gib

    def with_options(self, **options: Any) -> _Case:
        return replace(self, run=replace(self.run, options=replace(self.run.options, **options)))


def _run(arguments: Namespace) -> int:
    _refuse_unused(arguments)
    if ":" in arguments.model and (folder := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does: the installed command has its own folder there
    case = _case_of(arguments)
    with _quiet():
        estimate = _measured(case, "as asked")
        other = None if arguments.quick else _estimate_or_none(_other_recompute(case), "for comparison")
        tried = list(_search(case, estimate, other)) if not (arguments.quick or case.fits(estimate)) else []
    if arguments.json:
        sys.stdout.write(f"{json.dumps(_facts(case, estimate, other, tried), indent=2)}\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(case, estimate, other, tried))
    return 0 if case.fits(estimate) else 1


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the strategy's own reports, which are about this process."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _refuse_unused(arguments: Namespace) -> None:
    is_module = ":" in arguments.model
    unused = ("micro_batch", "sequence") if is_module else ("batch", "config")
    for name in unused:
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            if is_module:
                raise ValueError(f"{flag} is not for a LightningModule; use --batch, which says what is in one")
            raise ValueError(f"{flag} is not for a config.json; use --micro-batch and --sequence")
    for name in ("gpus", "micro_batch", "sequence", "accumulate"):
        number = getattr(arguments, name)
        if number is not None and number < 1:
            raise ValueError(f"--{name.replace('_', '-')} {number}: expected a positive number")


def _case_of(arguments: Namespace) -> _Case:
    content = _content_of(arguments.config)
    trainer = content.get("trainer") or {}
    names = [option.name for option in fields(TrainerOptions)]
    options = _strategy_of(trainer.get("strategy"))
    options |= {name: value for name in names if (value := getattr(arguments, name, None)) not in (None, False)}
    if arguments.recompute:
        options["recompute"] = {}
    for entry in arguments.set:
        name, is_given, text = entry.partition("=")
        if not is_given:
            raise ValueError(f"--set {entry}: expected NAME=VALUE, such as --set reshard_after_forward=false")
        options[name] = _value_of(text)
    if unknown := sorted(options.keys() - set(names)):
        raise ValueError(f"MFSDPStrategy has no option {unknown[0]!r}; expected one of {', '.join(names)}")
    try:
        checked = TrainerOptions(**options)
    except TypeError as error:
        raise ValueError(
            f"an option of the strategy is of the wrong kind; use JSON, as in --set NAME=JSON: {error}"
        ) from error
    policy = {} if arguments.grad_comm_dtype is None else {"grad_comm_dtype": getattr(torch, arguments.grad_comm_dtype)}
    precision = arguments.precision or _precision_of(trainer.get("precision"))
    return _Case(
        arguments=arguments,
        content=content,
        run=Rehearsal(ranks=arguments.gpus, options=checked, precision=precision, policy=policy),
    )


def _content_of(file: Path | None) -> Mapping[str, Any]:
    if file is None:
        return {}
    yaml: Any = importlib.import_module("yaml")
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is no YAML; give a file that LightningCLI reads: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{file}: expected the sections of LightningCLI, such as model and trainer, got {content!r:.80}"
        )
    return content


def _strategy_of(section: Any) -> dict[str, Any]:
    if section is None:
        return {}
    if isinstance(section, str):
        if section not in REGISTERED:
            raise ValueError(f"strategy: expected one of {', '.join(REGISTERED)}, or a class path, got {section!r}")
        arguments, _ = REGISTERED[section]
        return dict(arguments)
    options = dict(section.get("init_args") or {})
    options.pop("timeout", None)  # of collectives, in a form that only LightningCLI reads
    if isinstance(policy := options.get("policy"), Mapping):
        options["policy"] = _policy_of(policy)
    return options


def _policy_of(section: Mapping[str, Any]) -> MixedPrecisionPolicy:
    """A policy of a configuration file, where dtypes are names such as torch.bfloat16."""
    given = section.get("init_args") or {} if "class_path" in section else section
    values: dict[str, Any] = {
        name: getattr(torch, value.removeprefix("torch."), value) if isinstance(value, str) else value
        for name, value in given.items()
    }
    try:
        return MixedPrecisionPolicy(**values)
    except TypeError as error:
        raise ValueError(f"policy: expected fields of MixedPrecisionPolicy, got {dict(section)}: {error}") from error


def _precision_of(given: Any) -> Any:
    precision = "bf16-mixed" if given is None else str(given)
    if precision not in get_args(PrecisionName):
        raise ValueError(f"precision: {precision!r}: expected one of {', '.join(get_args(PrecisionName))}")
    return precision


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# -- what else could be done -------------------------------------------------------------------------------------------


def _other_recompute(case: _Case) -> _Case:
    return case.with_options(recompute={} if case.run.options.recompute is None else None)


def _measured(case: _Case, what: str) -> MemoryEstimate:
    """The estimate of a case; says on stderr that it begins and what it came to: one takes minutes for a large model, and others follow."""
    began = time.monotonic()
    estimate = case.estimate(what)
    sys.stderr.write(f"{what}: {case.total_gib(estimate):.1f} GiB, computed in {time.monotonic() - began:.0f} s\n")
    return estimate


def _estimate_or_none(case: _Case, what: str) -> MemoryEstimate | None:
    """`None`: this model cannot be trained so."""
    try:
        return _measured(case, what)
    except (ValueError, RuntimeError):
        return None


@dataclass(frozen=True)
class _Tried:
    flags: str
    gib: float
    fits: bool


def _search(case: _Case, asked: MemoryEstimate, other: MemoryEstimate | None) -> Iterator[_Tried]:
    """Options one after the other, each beside those before it that helped, until it fits. From cheap to expensive."""
    best, flags, lowest = case, list[str](), case.total_gib(asked)
    for flag, change in _candidates(case):
        changed = change(best)
        estimate = other if flag == "--recompute" else _estimate_or_none(changed, " ".join([*flags, flag]))
        if estimate is None or (gib := changed.total_gib(estimate)) >= lowest:
            continue
        best, lowest = changed, gib
        flags.append(flag)
        fits = changed.fits(estimate)
        yield _Tried(" ".join(flags), gib, fits)
        if fits:
            return


def _candidates(case: _Case) -> Iterator[tuple[str, Any]]:
    options, given, run = case.run.options, case.arguments, case.run
    if case.accumulates and options.accumulation == "local":
        yield "--set accumulation=sharded", lambda case: case.with_options(accumulation="sharded")
    if options.recompute is None:
        yield "--recompute", lambda case: case.with_options(recompute={})
    if not options.free_gradients:
        yield "--free-gradients", lambda case: case.with_options(free_gradients=True)
    if "grad_comm_dtype" not in run.policy:
        yield "--grad-comm-dtype bfloat16", _with_bfloat16_reduction
    if given.optimizer == "adamw" or (given.optimizer is None and ":" not in given.model):
        yield "--optimizer adamw_bf16", partial(_with_argument, optimizer="adamw_bf16")
    if (given.micro_batch or 1) > 1:
        yield "--micro-batch 1", partial(_with_argument, micro_batch=1)
    if options.sharding not in ("optim_grads_params", 3):
        yield "--sharding optim_grads_params", lambda case: case.with_options(sharding="optim_grads_params")
    if options.offload is None:
        yield "--offload optimizer", lambda case: case.with_options(offload="optimizer")
    if ":" not in given.model and (given.sequence or 4096) >= _LONG_SEQUENCE:
        for size in (2, 4, 8):
            if size > options.context and run.ranks % (size * options.outer * options.tensor) == 0:
                yield f"--context {size}", partial(_with_context, size=size)


def _with_bfloat16_reduction(case: _Case) -> _Case:
    return replace(case, run=replace(case.run, policy={**case.run.policy, "grad_comm_dtype": torch.bfloat16}))


def _with_argument(case: _Case, **values: Any) -> _Case:
    return replace(case, arguments=Namespace(**{**vars(case.arguments), **values}))


def _with_context(case: _Case, size: int) -> _Case:
    return case.with_options(context=size)


# -- what is printed ---------------------------------------------------------------------------------------------------


def _rows(case: _Case, estimate: MemoryEstimate) -> dict[str, int]:
    """Bytes at the peak by kind, with the reserve; kinds that are never there are left out."""
    kinds = {kind: estimate.peak.get(kind, 0) for kind, most in estimate.most.items() if most}
    return {**kinds, "reserve": case.reserve_bytes(estimate)}


def _lines(case: _Case, estimate: MemoryEstimate, other: MemoryEstimate | None, tried: list[_Tried]) -> Iterator[str]:
    given, run = case.arguments, case.run
    sizes = run.options.mesh_sizes.of_world(run.ranks, run.node_size)
    axes = ", ".join(f"{name} {size}" for name, size in {**sizes, "expert": run.options.expert}.items() if size > 1)
    yield f"{given.model}: {estimate.parameters:,} parameters on {run.ranks} GPUs{f' ({axes})' if axes else ''}, {run.precision}"
    yield ""
    is_recomputed = run.options.recompute is not None
    heads = ["GiB of each GPU", "most", "at the peak"]
    compared = {} if other is None else _rows(case, other)
    if other is not None:
        heads.append("without recompute" if is_recomputed else "with --recompute")
    rows = [tuple(heads)]
    for kind, size_bytes in _rows(case, estimate).items():
        most = estimate.most.get(kind, size_bytes)
        rows.append((kind, *map(_gib, (most, size_bytes)), *([_gib(compared.get(kind, 0))] if other else [])))
    totals = [case.total_gib(estimate), *([case.total_gib(other)] if other else [])]
    rows.append(("total", "", *(f"{total:.2f}" for total in totals)))
    rows.append((f"of {given.gib:g} GiB", "", *("fits" if total <= given.gib else "does not fit" for total in totals)))
    yield from table_lines(rows, right=(1, 2, 3))
    yield ""
    yield f"the peak comes with: {estimate.moment}"
    if estimate.host:
        yield f"host memory of each GPU's process: {_gib(estimate.host)} GiB of main weights and optimizer state"
    if estimate.padding > _MUCH_PADDING:
        yield (
            f"padding: {estimate.padding:.0%} of the parameters, because some have fewer rows than there are ranks, or rows that do not "
            "divide well; another number of ranks along the shard axis takes less"
        )
    if tried or not case.fits(estimate):
        yield from _advice(case, estimate, tried)


def _advice(case: _Case, estimate: MemoryEstimate, tried: list[_Tried]) -> Iterator[str]:
    given = case.arguments
    largest = max(_rows(case, estimate).items(), key=lambda row: row[1])
    yield ""
    yield (
        f"does not fit: {case.total_gib(estimate):.1f} of {given.gib:g} GiB, most of it {largest[0]} ({_gib(largest[1])} GiB)"
    )
    for attempt in tried:
        yield f"  with {attempt.flags}: {attempt.gib:.1f} GiB, {'fits' if attempt.fits else 'does not fit'}"
    if not given.quick and not any(attempt.fits for attempt in tried):
        yield "  nothing that was tried makes it fit: use more GPUs, or larger ones"


def _gib(size_bytes: int) -> str:
    gib = size_bytes / _GIB
    return f"{gib:.4f}" if 0 < gib < 0.1 else f"{gib:.2f}"  # MiB of a small model are seen, too


def _facts(case: _Case, estimate: MemoryEstimate, other: MemoryEstimate | None, tried: list[_Tried]) -> dict[str, Any]:
    """For programs: everything in bytes."""

    def described(one: MemoryEstimate) -> dict[str, Any]:
        return {
            "peak": _rows(case, one),
            "most": {kind: most for kind, most in one.most.items() if most},
            "moment": one.moment,
            "host": one.host,
            "total": case.total_bytes(one),
            "fits": case.fits(one),
        }

    return {
        "model": case.arguments.model,
        "parameters": estimate.parameters,
        "gpus": case.run.ranks,
        "gib": case.arguments.gib,
        "padding": estimate.padding,
        **described(estimate),
        "other_recompute": None if other is None else described(other),
        "tried": [vars(attempt) for attempt in tried],
    }
