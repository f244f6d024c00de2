"""Completes the arguments of transformers' models, which see a part of a sequence: positions, the next part's first label, counts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp.base.transformers_models import models_in, pretrained
from lightning_mfsdp.context_parallel.attention import context_positions
from lightning_mfsdp.context_parallel.sharing import ContextParallel, Cut, active
from lightning_mfsdp.context_parallel.targets import IGNORED, shift_labels, tokens_in_batch, without_padding

__all__ = ["complete_inputs"]

# What `loss_type` of a model says of its labels: whether they are shifted.
_SHIFTED = {"ForCausalLM": True, "ForMaskedLM": False, "ForTokenClassification": False}


def complete_inputs(module: nn.Module, *, always_counts: bool = False) -> Callable[[], None]:
    """Complete the arguments of forwards in which sequences are divided, while training and in evaluation.

    Args:
        module: Any, with models of transformers inside.
        always_counts: Losses are divided by the number of targets on all ranks also where sequences are whole.

    Returns:
        Ends it.
    """
    complete = partial(_complete, always_counts)
    # Those inside as well: a step may call the model without its head.
    models = {id(part): part for _, model in models_in(module) for part in pretrained(model)}
    handles = [model.register_forward_pre_hook(complete, with_kwargs=True) for model in models.values()]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def _complete(
    always_counts: bool, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    parallel = active()
    is_divided = parallel is not None and parallel.cut is not None
    if not is_divided and not (always_counts and torch.is_grad_enabled()):
        return None
    signature = inspect.signature(model.forward)
    bound = signature.bind_partial(*args, **kwargs)
    arguments: dict[str, Any] = dict(bound.arguments)
    rest = next(
        (name for name, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD), None
    )
    arguments.update(arguments.pop(rest, {}) if rest is not None else {})
    if parallel is not None and parallel.cut is not None:
        _complete_part(model, signature, arguments, parallel, parallel.cut)
    labels = arguments.get("labels")
    if isinstance(labels, Tensor):
        _complete_targets(model, labels, arguments)
    return (), arguments


def _complete_part(
    model: nn.Module, signature: inspect.Signature, arguments: dict[str, Any], parallel: ContextParallel, cut: Cut
) -> None:
    tokens = arguments.get("input_ids") if arguments.get("input_ids") is not None else arguments.get("inputs_embeds")
    if not isinstance(tokens, Tensor):
        return
    name = type(model).__name__
    if tokens.size(1) * parallel.size != cut.length:
        raise ValueError(
            f"{name} was called with sequences of {tokens.size(1)} tokens, in a step whose batch has {cut.length} divided among "
            f"{parallel.size} ranks, {cut.length // parallel.size} each. Pass it all of them, without slices, "
            "and generate in hooks such as on_validation_batch_start, which see whole sequences"
        )
    for argument, matters in (
        ("attention_mask", cut.has_mask and cut.is_real is not None),
        ("position_ids", cut.document is not None),
    ):
        if matters and arguments.get(argument) is None and argument in signature.parameters:
            raise ValueError(
                f"{name} was called without {argument}, and the batch has one that says which tokens see each other, which whole sequences "
                f"were divided with. Pass it to the model, or leave it out of the batch"
            )
    if arguments.get("position_ids") is None:
        arguments["position_ids"] = context_positions(tokens.size(1), tokens.device).unsqueeze(0)
    if "use_cache" in signature.parameters:
        _without_cache(model, arguments, packed=cut.document is not None)


def _is_checkpointing(model: nn.Module) -> bool:
    """Whether transformers recomputes activations of the model, which also turns its cache off; transformers 5.23 renamed the property."""
    kind = type(model)
    name = (
        "is_activation_checkpointing" if hasattr(kind, "is_activation_checkpointing") else "is_gradient_checkpointing"
    )
    return bool(getattr(model, name, False))


def _without_cache(model: nn.Module, arguments: dict[str, Any], *, packed: bool) -> None:
    """Keys of a part are no cache. But a model that keeps one takes packed documents for a single one, on one rank as well."""
    use_cache = arguments.get("use_cache")
    keeps_cache = getattr(model.config, "use_cache", False) if use_cache is None else use_cache
    if keeps_cache and packed and not (model.training and _is_checkpointing(model)):
        raise ValueError(
            f"{type(model).__name__}: position_ids of the batch begin again, as those of packed documents do, and use_cache=True; "
            "transformers then lets tokens attend to other documents. Use model.config.use_cache = False for training, or leave "
            "position_ids out of the batch"
        )
    arguments["use_cache"] = False


def _complete_targets(model: nn.Module, labels: Tensor, arguments: dict[str, Any]) -> None:
    kind = getattr(model, "loss_type", None) or "ForCausalLM"  # as transformers has it for models that name none
    if kind not in _SHIFTED:
        raise ValueError(
            f"{type(model).__name__} computes a loss of type {kind} from labels, which is not known to be a mean over tokens; expected "
            f"one of {', '.join(_SHIFTED)}. Call it without labels and compute the loss with tokens_in_batch, or leave context and "
            "loss_count out"
        )
    config = model.config
    if getattr(config, "output_router_logits", False) or arguments.get("output_router_logits"):
        raise ValueError(
            f"{type(model).__name__} adds a loss of its router, which is no mean over tokens, so that of parts is another. Use "
            "output_router_logits=False and balance experts without a loss, or leave context out"
        )
    if arguments.get("num_items_in_batch") is not None:
        raise ValueError(
            f"{type(model).__name__} was called with num_items_in_batch, which the strategy counts over all ranks; leave it out"
        )
    parallel = active()
    targets = arguments.get("shift_labels")
    if targets is None and _SHIFTED[kind]:
        targets = arguments["shift_labels"] = shift_labels(labels)
    elif targets is None:
        targets = labels if parallel is None else without_padding(labels, parallel, ahead=0)
        arguments["labels"] = targets
    if parallel is not None and parallel.cut is not None:
        _refuse_targets_at_padding(model, targets, parallel, parallel.cut)
    arguments["num_items_in_batch"] = tokens_in_batch(targets)


def _refuse_targets_at_padding(model: nn.Module, targets: Tensor, parallel: ContextParallel, cut: Cut) -> None:
    """What padding computes is unspecified, so it has no targets; looked at where the step is watched, because the host waits."""
    if cut.is_real is None or not parallel.is_watched:
        return
    wrong = ((targets != IGNORED) & ~parallel.part_of(cut.is_real, 1)).any().to(torch.int32)
    dist.all_reduce(wrong, op=dist.ReduceOp.MAX, group=parallel.group)  # so that all of them raise
    if bool(wrong):
        raise ValueError(
            f"{type(model).__name__}: labels of padding tokens are not -100, and what padding computes is unspecified with divided "
            "sequences. Use -100 for labels where attention_mask is 0"
        )
