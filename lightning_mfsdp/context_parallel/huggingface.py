"""Attention of Hugging Face's models (transformers 5) over divided sequences, through its own registries of attention and mask functions.

A model's layers call a function registered here. It exchanges heads for sequences, calls the function that the model had before on whole
sequences, and exchanges back. A model's masks are made from the lengths that it sees, which are those of parts. So the function
registered for masks returns which pattern the model asks for, and the attention function has a mask for whole sequences made of it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.transformers_models import configurations, models_in, pretrained
from lightning_mfsdp.context_parallel.attention import (
    AttentionCall,
    as_computed,
    check_length,
    gathered_attention,
    heads_and_sequences,
)
from lightning_mfsdp.context_parallel.exchange import to_sequence
from lightning_mfsdp.context_parallel.mask_functions import read_mask_function
from lightning_mfsdp.context_parallel.pattern import Pattern, padding_to_mask, remembered
from lightning_mfsdp.context_parallel.sharing import ContextParallel, Cut, Method, active

__all__ = ["choose_method", "copied_configurations", "use_context_attention"]

# Before the name of the implementation that a model had.
_PREFIX = "mfsdp_context_"

# Kinds of layers that transformers' configurations name, and that see nothing of a sequence but by attention.
_LAYER_TYPES = ("full_attention", "sliding_attention")

# Ends of names of models with one result for a sequence, or places in it.
_OF_SEQUENCES = ("ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction")

# Layers that carry something along the sequence from token to token.
_RECURRENT = re.compile(r"Mamba|Recurrent|Rwkv|RWKV|DeltaNet|LinearAttention|LightningAttention|RgLru|ShortConv|SSM")
_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
_ATTENTION = re.compile(r"Attention|Attn|MHA")

# Arguments of attention functions with numbers for each place of a sequence, made for a part's places.
_OF_PLACES = (
    "position_bias",
    "head_mask",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "block_table",
)


@dataclass(frozen=True, kw_only=True)
class _InPlaceOfMask:
    """What a model passes to its layers as their mask, in a forward of a divided batch."""

    pattern: Pattern


def use_context_attention(module: nn.Module, parallel: ContextParallel) -> Callable[[], None]:
    """Have the Hugging Face models inside `module` attend over the ranks of a context axis.

    Batches that were not divided (`parallel.cut` is `None`) are attended as before.

    Args:
        module: Any, with such models inside.
        parallel: The ranks, and the method.

    Returns:
        A function that undoes it.

    Raises:
        ShardingError: A model cannot be computed with divided sequences; with its name and what to do. Then nothing has changed.
    """
    models = list(_named_models(module))
    bases = {name: _checked_base(name, model, parallel) for name, model in models}
    before: list[tuple[Any, str | None]] = []
    hooks: list[Any] = []

    def undo() -> None:
        for config, implementation in before:  # the outer ones first: they pass on what they are set to
            config._attn_implementation = implementation
        for hook in hooks:
            hook.remove()
        before.clear()
        hooks.clear()

    for name, model in models:
        before += [(config, _before(config)) for config in configurations(model.config)]
        implementation = _registered(bases[name])
        model.set_attn_implementation(implementation)
        if any(part.config._attn_implementation != implementation for part in pretrained(model)):
            undo()
            raise ShardingError(
                f"{name}: transformers could not change its attention function: its layers do not call the one that is chosen by"
                " attn_implementation. Train this model with context=1."
            )
        hooks += [layer.register_forward_hook(_must_compute(path)) for path, layer in _attention_layers(name, model)]
    return undo


def copied_configurations(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, with copies of configurations of transformers' models, which may be changed again before they are saved."""
    return {
        key: copy.deepcopy(value) if hasattr(value, "_attn_implementation") else value for key, value in values.items()
    }


def _transformers(name: str) -> Any:
    return importlib.import_module(f"transformers.{name}")


def _attention_functions() -> Any:
    return _transformers("modeling_utils").ALL_ATTENTION_FUNCTIONS


def _mask_functions() -> Any:
    return _transformers("masking_utils").ALL_MASK_ATTENTION_FUNCTIONS


def choose_method(module: nn.Module, size: int) -> Method:
    """The method "ulysses", unless the heads of a model inside cannot be divided over `size` ranks, those of a tensor axis included."""
    for _, model in models_in(module):
        for config in configurations(model.config):
            heads = getattr(config, "num_attention_heads", None)
            if isinstance(heads, int) and heads % size:
                return "gather"
    return "ulysses"


def _named_models(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost models of transformers inside, with names for messages."""
    for name, model in models_in(module):
        yield f"{name} ({type(model).__name__})" if name else type(model).__name__, model


def _attention_layers(name: str, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The attention layers of a model, with names for messages: those with no other one inside."""

    def is_attention(part: nn.Module) -> bool:
        return part is not model and _ATTENTION.search(type(part).__name__) is not None

    return [
        (f"{name}: {path} ({type(part).__name__})", part)
        for path, part in model.named_modules()
        if is_attention(part) and not any(is_attention(child) for child in part.modules() if child is not part)
    ]


def _checked_base(name: str, model: Any, parallel: ContextParallel) -> str:
    """The attention implementation that the model has; a model that cannot be divided is refused."""
    for reason in _reasons(model, parallel):
        raise ShardingError(f"{name}: {reason}, so context > 1 cannot train it. Use context=1.")
    for config in configurations(model.config) if parallel.method == "ulysses" else ():
        heads = getattr(config, "num_attention_heads", None)
        if isinstance(heads, int) and heads % parallel.size:
            raise ShardingError(
                f"{name}: its {heads} query heads cannot be divided over {parallel.size} context ranks, as context_method='ulysses' does. "
                "Use context_method='auto' or 'gather', which divides no heads."
            )
    implementations = sorted({str(_before(part.config)) for part in pretrained(model)})
    base = implementations[0]
    if len(implementations) > 1:
        raise ShardingError(
            f"{name}: its parts have different attention implementations, {', '.join(implementations)}. Context parallelism takes one:"
            " load the model with attn_implementation='sdpa'."
        )
    if base == "eager" or base not in _attention_functions() or base not in _mask_functions():
        raise ShardingError(
            f"{name}: its attention implementation {base!r} cannot be used with context > 1: load the model with"
            " attn_implementation='sdpa', or one that is registered with AttentionInterface and AttentionMaskInterface."
        )
    if parallel.method == "gather" and base != "sdpa":
        raise ShardingError(
            f"{name}: context_method='gather' computes attn_implementation='sdpa', and the model has {base!r}. Load it with that, or"
            " use context_method='ulysses'."
        )
    modules_of_layers = {sys.modules[type(layer).__module__] for _, layer in _attention_layers(name, model)}
    if any(
        getattr(source, "ALL_ATTENTION_FUNCTIONS", _attention_functions()) is not _attention_functions()
        for source in modules_of_layers
    ):
        raise ShardingError(
            f"{name}: it has its own registry of attention functions, so context > 1 cannot train it. Use context=1."
        )
    if "q_length" not in inspect.signature(_mask_functions()[base]).parameters:
        raise ShardingError(
            f"{name}: the mask function of {base!r} takes no q_length: install a later version of transformers"
        )
    return base


def _reasons(model: Any, parallel: ContextParallel) -> Iterator[str]:
    """Why a model cannot be computed with divided sequences, if there are reasons."""
    for config in configurations(model.config):
        if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
            yield "it has cross-attention between two sequences, of which only one is divided"
        for kind in getattr(config, "layer_types", None) or ():
            if kind not in _LAYER_TYPES:
                yield f"it has layers of type {kind!r}, and only {' and '.join(_LAYER_TYPES)} can be computed on parts of sequences"
    for path, part in model.named_modules():
        if isinstance(part, _CONVOLUTIONS):
            yield f"{path} ({type(part).__name__}) computes a token from its neighbors, which can be on another rank"
        if isinstance(part, nn.RNNBase) or _RECURRENT.search(type(part).__name__):
            yield f"{path} ({type(part).__name__}) carries a state along the sequence, which is divided"
        if type(part).__name__.endswith("Pooler"):
            yield f"{path} ({type(part).__name__}) reads one token of a sequence, which one rank has"
    if type(model).__name__.endswith(_OF_SEQUENCES):
        yield "its result is one of a whole sequence"
    if not _attention_layers("", model):
        yield "no layer of attention was found in it by its class name"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        yield "its forward takes no position_ids, and would number the tokens of this rank's part from 0"


def _before(config: Any) -> str | None:
    """The implementation that a configuration has; where it is one of those registered here, its base."""
    implementation: str | None = config._attn_implementation
    function = None if implementation is None else _attention_functions().get(implementation)
    if isinstance(function, functools.partial) and function.func is _attend:
        base: str = function.args[0]
        return base
    return implementation


def _registered(base: str) -> str:
    """The name under which transformers finds the functions below for this base."""
    # transformers looks for a kernel of the name where it has "flash" in it, and for one in its hub where it has "/".
    name = _PREFIX + base.replace("flash_attention", "fa").replace("flash", "fa").replace("/", "_")
    _transformers("modeling_utils").AttentionInterface.register(name, functools.partial(_attend, base))
    _transformers("masking_utils").AttentionMaskInterface.register(name, functools.partial(_mask, base))
    return name


def _must_compute(name: str) -> Callable[..., None]:
    """A hook that refuses a layer which computes attention without the registered function."""
    passed = False

    def hook(layer: nn.Module, *_: Any) -> None:
        nonlocal passed
        parallel = active()
        if passed or parallel is None or parallel.cut is None:
            return
        if layer not in parallel.attention_layers:
            raise ShardingError(
                f"{name} did not call the attention function that is chosen by attn_implementation, and attended to this rank's part"
                " of the sequences alone. Train this model with context=1."
            )
        passed = True

    return hook


# -- what a model asks for ---------------------------------------------------------------------------------------------


def _mask(base: str, *positional: Any, **arguments: Any) -> Any:
    """The registered mask function: what a model passes to its layers, the base's mask or what stands in its place."""
    parallel = active()
    if parallel is None or parallel.cut is None:
        return _mask_functions()[base](*positional, **arguments)
    bound = inspect.signature(_mask_functions()[base]).bind(*positional, **arguments).arguments
    return _in_place_of_mask(parallel, parallel.cut, bound, by_positions=_is_flash(base))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_place_of_mask(
    parallel: ContextParallel, cut: Cut, arguments: dict[str, Any], *, by_positions: bool
) -> _InPlaceOfMask:
    arguments = {**arguments.get("kwargs", {}), **arguments}
    model = type(arguments["config"]).__name__.removesuffix("Config") if "config" in arguments else "a model"
    queries, keys = arguments["q_length"], arguments["kv_length"]
    padding = arguments.get("attention_mask")
    if padding is not None and padding.shape[-1] != queries:
        raise ShardingError(
            f"{model}: attention_mask has {padding.shape[-1]} tokens and this rank's part of the sequences {queries}. Leave it out,"
            " or have it divided as the other tensors of the batch."
        )
    if keys != queries or int(arguments.get("q_offset", 0)):
        raise ShardingError(
            f"{model}: {keys} keys for {queries} queries: a cache of earlier tokens cannot be used in a forward of a divided batch."
            " Run generation with whole batches, outside of training steps."
        )
    check_length(parallel, cut, queries, model)
    pattern, documents = read_mask_function(arguments["mask_function"], model)
    _check_contents(parallel, cut, documents, padding, model)
    if cut.document is not None and documents is None and padding is None and not by_positions:
        _refuse_unread_documents(parallel, cut.document, model)
    return _InPlaceOfMask(pattern=pattern)


def _check_contents(
    parallel: ContextParallel, cut: Cut, documents: Tensor | None, padding: Tensor | None, model: str
) -> None:
    """Refuse padding and documents that the model sees and the batch's division does not have: one host sync where it sees some."""
    device = next((tensor.device for tensor in (documents, padding) if tensor is not None), None)
    if device is None:
        return
    real = None if cut.is_real is None else parallel.part_of(cut.is_real.to(device), 1)
    wrong = []
    if padding is not None:
        wrong.append((padding != (True if real is None else real)).any())
    if documents is not None:
        starts = _starts(documents, parallel)
        if cut.document is not None:
            starts = starts != _starts(parallel.part_of(cut.document.to(device), 1), parallel)
        if real is not None:
            chunks = real.unflatten(1, (len(parallel.chunks()), -1))
            starts = starts & chunks[..., 1:] & chunks[..., :-1]
        wrong.append(starts.any())
    if bool(torch.stack(wrong).any()):
        what = {
            (True, False): "its attention_mask does",
            (False, True): "where its position_ids begin again does",
            (True, True): "its attention_mask or where its position_ids begin again does",
        }[padding is not None, documents is not None]
        raise ShardingError(
            f"{model}: {what} not match the batch that was divided. Padding and documents of whole sequences must be known when a batch"
            " is divided: have attention_mask and position_ids in the batch, and do not change them in between."
        )


def _refuse_unread_documents(parallel: ContextParallel, document: Tensor, model: str) -> None:
    """Refuse packed documents where one begins inside a chunk, and the model's mask does not keep them apart: one host sync."""
    if bool(_starts(parallel.part_of(document, 1), parallel).any()):
        raise ShardingError(
            f"{model}: position_ids of the batch begin again, as those of packed documents do, but this model does not keep documents"
            " apart, on one rank neither. Leave position_ids out of the batch, or give each document a sequence of its own."
        )


def _starts(documents: Tensor, parallel: ContextParallel) -> Tensor:
    """Where another document begins inside of a chunk, `[batch, chunks, tokens of a chunk - 1]`."""
    chunks: Tensor = documents.unflatten(1, (len(parallel.chunks()), -1))
    return chunks[..., 1:] != chunks[..., :-1]


# -- attention ---------------------------------------------------------------------------------------------------------


def _attend(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Any]:
    """The registered attention function, which layers call: `[B, H, S/c, D]` to `[B, S/c, H, D]`."""
    parallel = active()
    if parallel is None or parallel.cut is None:
        result: tuple[Tensor, Any] = _attention_functions()[base](
            _as_base(base, module), query, key, value, attention_mask, **options
        )
        return result
    output: Tensor = _attend_parts(parallel, parallel.cut, base, module, query, key, value, attention_mask, options)
    return output, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_parts(
    parallel: ContextParallel,
    cut: Cut,
    base: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    options: dict[str, Any],
) -> Tensor:
    with parallel.attending():
        parallel.attention_layers.add(module)
        name = _name_of(module)
        check_length(parallel, cut, query.shape[2], name)
        if key.shape[2] != query.shape[2]:
            raise ShardingError(
                f"{name}: {key.shape[2]} keys for {query.shape[2]} queries: attention to another sequence, or to a cache of earlier tokens,"
                " cannot be computed in a forward of a divided batch. Use context=1."
            )
        for argument in _OF_PLACES:
            if options.get(argument) is not None:
                raise ShardingError(
                    f"{name}: attention with {argument} cannot be computed on parts of sequences: leave it out, or use context=1"
                )
        options.pop("position_ids", None)  # of this rank's tokens; documents are in the cut
        pattern = _pattern_of(base, module, attention_mask, options, name).within(cut.length)
        query, key, value = as_computed(query, key, value)
        if parallel.method == "gather":
            return _gathered(parallel, cut, query, key, value, pattern, options, name)
        query, key, value = heads_and_sequences(parallel, query, key, value, name)
        options["is_causal"] = pattern.causal
        if options.get("s_aux") is not None:
            options["s_aux"] = options["s_aux"].chunk(parallel.size)[parallel.rank]
        if _is_flash(base):
            options["sliding_window"] = None if pattern.reach is None else pattern.reach + 1
            options.update(_documents_of_flash(cut, query.device, name))
        # The same for all layers of a step that attend alike.
        key_of_mask = (base, pattern, query.dtype, query.device)
        mask = remembered(cut, key_of_mask, lambda: _whole_mask(base, cut, pattern, module.config, query))
        groups = query.shape[1] // key.shape[1]
        layer = _View(_as_base(base, module), num_key_value_groups=groups)
        output, _ = _attention_functions()[base](layer, query, key, value, mask, **options)
        return to_sequence((output,), parallel.group, heads=2, sequence=1)[0]


def _gathered(
    parallel: ContextParallel,
    cut: Cut,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    options: dict[str, Any],
    name: str,
) -> Tensor:
    for argument in ("softcap", "s_aux"):
        if options.get(argument) is not None:
            raise ShardingError(
                f"{name}: {argument} is not supported by context_method='gather'. Use context_method='ulysses'."
            )
    call = AttentionCall(
        F.scaled_dot_product_attention,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
        enable_gqa=True,
    )
    return gathered_attention(parallel, cut, call, query, key, value, pattern).transpose(1, 2).contiguous()


def _name_of(module: Any) -> str:
    number = getattr(module, "layer_idx", None)
    return type(module).__name__ if number is None else f"{type(module).__name__} of layer {number}"


def _is_flash(base: str) -> bool:
    """Whether it takes windows and causality as arguments, and no mask but of padding."""
    flash = _transformers("masking_utils").flash_attention_mask
    return _mask_functions()[base] is flash


def _pattern_of(base: str, module: Any, attention_mask: Any, options: dict[str, Any], name: str) -> Pattern:
    """What a layer attends to, by its mask or, for flash kernels, by its arguments; these must not contradict each other."""
    if attention_mask is not None and not isinstance(attention_mask, _InPlaceOfMask):
        raise ShardingError(
            f"{name}: got a mask of its own, a {type(attention_mask).__name__} of shape {tuple(attention_mask.shape)}. With context > 1,"
            " give attention_mask as [batch, tokens], or leave it out."
        )
    is_causal = options.get("is_causal")
    by_arguments = Pattern(causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal))
    window = options.get("sliding_window")
    if _is_flash(base) and window is not None:
        by_arguments = Pattern(causal=by_arguments.causal, reach=window - 1)
    if attention_mask is None:
        return by_arguments
    asked: Pattern = attention_mask.pattern
    if _is_flash(base) and asked.causal != by_arguments.causal:
        raise ShardingError(
            f"{name}: its mask is {asked} and its arguments say {by_arguments}, of which {base} would take the second."
            " Make both say the same."
        )
    return by_arguments if _is_flash(base) else asked


def _whole_mask(base: str, cut: Cut, pattern: Pattern, config: Any, query: Tensor) -> Any:
    """The base's own mask for whole sequences."""
    document = None if cut.document is None else cut.document.to(query.device)
    padding = padding_to_mask(cut, pattern)
    if _is_flash(base) and document is not None:
        return None  # the kernel gets lengths of documents, which end before padding

    def attends(batch: Tensor, head: Tensor, place: Tensor, key: Tensor) -> Tensor:
        allowed = pattern.allows(place, key)
        return allowed if document is None else allowed & (document[batch, place] == document[batch, key])

    return _mask_functions()[base](
        batch_size=query.shape[0],
        q_length=cut.length,
        kv_length=cut.length,
        q_offset=0,
        kv_offset=0,
        mask_function=attends,
        attention_mask=None if padding is None else padding.to(query.device),
        local_size=None if pattern.reach is None else pattern.reach + 1,
        allow_is_causal_skip=pattern.causal and document is None,
        allow_is_bidirectional_skip=not pattern.causal and document is None,
        dtype=query.dtype,
        config=config,
        use_vmap=False,
        device=query.device,
    )


def _documents_of_flash(cut: Cut, device: torch.device, name: str) -> dict[str, Any]:
    """Lengths of documents, as flash kernels take them; empty if sequences are one document each."""
    if cut.document is None:
        return {}
    document = cut.document
    return remembered(cut, ("flash", device), lambda: _lengths(document.to(device), cut, name))


def _lengths(document: Tensor, cut: Cut, name: str) -> dict[str, Any]:
    changes = document[:, 1:] != document[:, :-1]
    wrong = (document[:, 1:] < document[:, :-1]).any()
    if cut.is_real is not None:
        real = cut.is_real.to(document.device)
        changes = changes | (real[:, 1:] != real[:, :-1])
        wrong = wrong | (real[:, 1:] & ~real[:, :-1]).any()
    if bool(wrong):
        raise ShardingError(
            f"{name}: flash attention needs documents in ascending order, with padding only at the end of sequences; use"
            " attn_implementation='sdpa' or 'flex_attention'"
        )
    starts = F.pad(changes, (1, 0), value=True).flatten().nonzero().flatten()
    ends = F.pad(starts, (0, 1), value=document.numel()).to(torch.int32)
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


class _View:
    """An object with some attributes replaced."""

    def __init__(self, target: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def _as_base(base: str, module: Any) -> Any:
    """The module, as the base function knows it: flash attention looks its kernel up by the name in the configuration."""
    return _View(module, config=_View(module.config, _attn_implementation=base)) if _is_flash(base) else module
