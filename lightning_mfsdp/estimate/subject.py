"""What a rehearsal trains: a model of transformers by its config.json, or a LightningModule by its class."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mfsdp._lightning_api import LightningModule, is_param_in_hook_signature
from lightning_mfsdp.base import compat
from lightning_mfsdp.optim import AdamW

__all__ = ["OPTIMIZERS", "Subject", "batch_of", "huggingface_subject", "lightning_subject"]

_ENTRY = re.compile(r"(?:(\w+)=)?(\w+)\[([\d,\s]+)\]")

# Those of PyTorch step all parameters of a group at once on GPUs, and on the CPU only where that is asked for.
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw_bf16": AdamW,
    "adamw_8bit": partial(AdamW, state_dtype="8bit"),
    "adam": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, foreach=True),
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and what a step of it is.

    Attributes:
        build: Makes the model, on the meta device; every call another one.
        batch: A microbatch, of whole sequences.
        loss: Of the model and a microbatch, or its part where sequences are divided.
        optimizers: Of a sharded model.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], Tensor]
    optimizers: Callable[[Any], list[Optimizer]]


def batch_of(description: str) -> Any:
    """The batch that a text stands for, of zeros.

    Args:
        description: "int64[4,129]" is a tensor, "float32[8,3,224,224] int64[8]" a tuple of two, "input_ids=int64[2,128]
            labels=int64[2,128]" a mapping.

    Raises:
        ValueError: It is none of these.
    """
    is_tuple = description.startswith("(") and description.endswith(")")
    inner = description[1:-1] if is_tuple else description
    entries = inner.split() if "," not in inner else re.findall(r"\S+?\[[^\]]*\]", inner)
    matches = [_ENTRY.fullmatch(entry) for entry in entries]
    names = [match[1] for match in matches if match is not None]
    dtypes = [getattr(torch, match[2], None) for match in matches if match is not None]
    is_mixed = len({name is None for name in names}) > 1
    if not entries or None in matches or is_mixed or not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
        raise ValueError(
            f'batch {description!r}: expected dtypes and shapes, such as "int64[4,129]", "float32[8,3,224,224] int64[8]" for a tuple, '
            '"(int64[4,129])" for one of a single tensor, or '
            '"input_ids=int64[2,128] labels=int64[2,128]" for a mapping'
        )
    tensors = [
        torch.zeros([int(size) for size in match[3].split(",")], dtype=getattr(torch, match[2]), device="cpu")
        for match in matches
        if match is not None
    ]
    if names[0] is not None:
        return dict(zip(names, tensors, strict=True))
    return tensors[0] if len(tensors) == 1 and not is_tuple else tuple(tensors)


# -- transformers ------------------------------------------------------------------------------------------------------


def huggingface_subject(path: Path, *, micro_batch: int, sequence: int, optimizer: str) -> Subject:
    """A causal language model of transformers, with its own loss.

    Args:
        path: Its config.json, or the folder of that. Nothing is downloaded.
        micro_batch: Sequences of a microbatch.
        sequence: Tokens of a sequence.
        optimizer: One of `OPTIMIZERS`.

    Raises:
        OSError, ValueError: There is no such file, or it is no configuration of a causal language model that transformers has.
        ImportError: Without transformers.
    """
    config = _configuration(path)

    def build() -> nn.Module:
        model: nn.Module = _transformers().AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        return model

    def batch() -> dict[str, Tensor]:
        tokens = torch.zeros(micro_batch, sequence, dtype=torch.int64, device="cpu")
        return {"input_ids": tokens, "labels": tokens.clone()}

    def loss(model: Any, batch: Any) -> Tensor:
        result: Tensor = model(**batch).loss
        return result

    return Subject(build=build, batch=batch, loss=loss, optimizers=lambda model: [_optimizer(optimizer, model)])


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f'the memory of a config.json needs transformers ({error}): pip install "lightning-mfsdp[hf]", or transformers alone'
        ) from error


def _configuration(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist. Give a LightningModule as package.module:ClassName, or the path of a model's config.json or of its "
            "folder. Nothing is downloaded: of a gated model, once you have accepted its license and downloaded that file"
        )
    try:
        content = json.loads(file.read_text())
        kind = content["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is no config.json of transformers; give the one that came with a model: {type(error).__name__}: {error}"
        ) from error
    transformers = _transformers()
    if content.get("auto_map") or kind not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{file}: transformers {transformers.__version__} has no model_type {kind!r} of its own, and code of a model's repository is "
            "not run. Install a version that has it, or give a LightningModule, as package.module:ClassName"
        )
    config = transformers.AutoConfig.for_model(**{"model_type": kind, **content})
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{file}: {kind!r} is no causal language model. Give a LightningModule that trains it, as package.module:ClassName"
        )
    config.use_cache = False  # as `Recompute` needs it
    return config


def _optimizer(name: str, model: nn.Module) -> Optimizer:
    return OPTIMIZERS[name]([parameter for parameter in model.parameters() if parameter.requires_grad])


# -- Lightning ---------------------------------------------------------------------------------------------------------


def lightning_subject(
    target: str, arguments: Mapping[str, Any], *, batch: str | None = None, optimizer: str | None = None
) -> Subject:
    """A LightningModule, with its `training_step` and, unless another is named, its `configure_optimizers`.

    Args:
        target: "package.module:ClassName".
        arguments: Of its constructor, as LightningCLI reads them from a file.
        batch: As `batch_of`; `None`: its `example_input_array`.
        optimizer: One of `OPTIMIZERS`; `None`: its own.

    Raises:
        ValueError: There is no such class, arguments that it does not take, or no batch.
        ImportError: Without jsonargparse, if there are arguments.
    """
    kind = _class_of(target)

    def build() -> nn.Module:
        try:
            module = _instance(kind, arguments)
            module.configure_model()
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"{target} cannot be built: it failed in {_place_of(error, kind)}. An estimate builds models on the meta device, where "
                "tensors have no values, and without a Trainer. Use __init__ and configure_model that neither load nor save weights"
            ) from error
        if not module.automatic_optimization:
            raise ValueError(
                f"{target}: its training_step calls the optimizers itself (automatic_optimization=False), and only automatic optimization "
                "can be estimated; "
                "use a step without optimizers"
            )
        return module

    with torch.device("meta"):
        example = None if batch is not None else build().example_input_array
    if batch is None and example is None:
        raise ValueError(
            f'{target}: its batch is not known; use --batch, such as --batch "int64[4,129]", or set example_input_array in the class'
        )

    def new_batch() -> Any:
        return batch_of(batch) if batch is not None else _zeros_like(example)

    def loss(module: LightningModule, part: Any) -> Tensor:
        takes_number = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        try:
            output: Any = module.training_step(part, 0) if takes_number else module.training_step(part)
        except Exception as error:
            if operator := compat.needs_values_because(error):
                raise ValueError(
                    f"{target}.training_step needs values of tensors ({operator}), and an estimate of memory has shapes alone; "
                    "use a step that computes all of a batch"
                ) from error
            raise ValueError(
                f"{target}.training_step failed in {_place_of(error, kind)}. An estimate has no Trainer, calls no hooks, and has the batch "
                'of --batch. Use a step that needs no more; a tuple of one is written as "(int64[4,129])"'
            ) from error
        result = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(result, Tensor):
            raise ValueError(f"{target}.training_step: expected a loss, a tensor, got {type(result).__name__}")
        return result

    def optimizers(module: LightningModule) -> list[Optimizer]:
        if optimizer is not None:
            return [_optimizer(optimizer, module)]
        try:
            return list(_optimizers_in(module.configure_optimizers()))
        except RuntimeError as error:
            raise ValueError(
                f"{target}.configure_optimizers failed without a Trainer ({error}). Use --optimizer, such as --optimizer adamw"
            ) from error

    return Subject(build=build, batch=new_batch, loss=loss, optimizers=optimizers)


def _place_of(error: Exception, kind: type) -> str:
    """The last line of a class's file that an error came through, and the error."""
    lines = traceback.extract_tb(error.__traceback__)
    own = [line for line in lines if line.filename == inspect.getfile(kind)] or lines
    return f"line {own[-1].lineno} of {own[-1].filename} ({type(error).__name__}: {error})"


def _class_of(target: str) -> type[LightningModule]:
    name, _, attribute = target.partition(":")
    try:
        kind = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{target}: there is no such class ({error}). Expected package.module:ClassName, importable from the current folder"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, LightningModule)):
        raise ValueError(f"{target}: expected a LightningModule, got {kind!r}")
    return kind


def _instance(kind: type[LightningModule], arguments: Mapping[str, Any]) -> LightningModule:
    if not arguments:
        return kind()
    try:
        from jsonargparse import ArgumentError, ArgumentParser
    except ImportError as error:
        raise ImportError(
            f"arguments of a class in a file need jsonargparse ({error}): pip install jsonargparse"
        ) from error
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "model")
    try:
        parsed = parser.parse_object({"model": dict(arguments)})
    except ArgumentError as error:
        raise ValueError(
            f"{kind.__name__}: its arguments in the file do not fit; use those of its constructor: {error}"
        ) from error
    module: LightningModule = parser.instantiate_classes(parsed).model
    return module


def _zeros_like(example: Any) -> Any:
    if isinstance(example, Tensor):
        return torch.zeros(example.shape, dtype=example.dtype, device="cpu")
    if isinstance(example, Mapping):
        return {key: _zeros_like(value) for key, value in example.items()}
    return tuple(map(_zeros_like, example))


def _optimizers_in(configured: Any) -> Iterator[Optimizer]:
    """The optimizers in what `configure_optimizers` returned; schedulers take no memory."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, Mapping):
        yield configured["optimizer"]
    elif isinstance(configured, Sequence):
        for entry in configured[0] if configured and isinstance(configured[0], Sequence) else configured:
            yield from _optimizers_in(entry)
