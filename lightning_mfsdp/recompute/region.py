"""Region: a module whose forward saves only its inputs, and runs again in backward.

A region replaces the module's `forward`, so hooks stay outside and run once: those of a sharded module have gathered its
weights for the backward when its activations are recomputed. Names of parameters and modules do not change.

Recomputation is PyTorch's non-reentrant checkpoint, or Transformer Engine's where its modules quantize. What neither handles comes
from a `RegionCall`: precision, routes, statistics of norms, kept operators, inputs stored elsewhere, weights of units around.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lightning_mfsdp.te as te
from lightning_mfsdp.base.containers import tensors_in
from lightning_mfsdp.engine import EngineStateError, gather_again, is_sharded
from lightning_mfsdp.recompute.chunk import LayerChunk, Link, Linked, Results, handle
from lightning_mfsdp.recompute.config import Recompute
from lightning_mfsdp.recompute.host_copies import HostCopies, HostCopy
from lightning_mfsdp.recompute.operators import CHOICES, drawing, keeping
from lightning_mfsdp.recompute.replay import (
    KeptChoices,
    KeptDraws,
    PrecisionSnapshot,
    counted_once,
    cuda_position,
    filled,
    keeps_statistics,
    outlined,
    routers_in,
    uncached_casts,
)
from lightning_mfsdp.recompute.tiles import SavedPiece, in_tiles, unnoticed_saves

__all__ = ["Region", "can_stop_early", "refuse_operators", "refuse_tiles", "region_of"]

_REGION = "_mfsdp_recompute"
# What decoders of Hugging Face call their cache of keys and values (`cache` since transformers 5.24). In training it is passed, too, unless
# disabled.
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")


def region_of(module: nn.Module) -> Region | None:
    """The region that a module is, or `None`."""
    return module.__dict__.get(_REGION)


def refuse_tiles(name: str) -> None:
    """Raise a ValueError: a module that has modules of Transformer Engine inside is to be computed in pieces."""
    raise ValueError(
        f"Recompute: tiled_modules: {name} has modules of Transformer Engine, whose scales belong to a whole sequence; leave this "
        "module out, and recompute layers as a whole"
    )


def refuse_operators(name: str, config: Recompute) -> None:
    """Raise a ValueError if operators are to be kept in a module that has modules of Transformer Engine inside."""
    if config.save_ops:
        raise ValueError(
            f"Recompute: save_ops: {name} has modules of Transformer Engine, which are one operator each; choose modules to recompute "
            'instead, as in Recompute(method="selective", modules=["*.mlp"])'
        )


class Region:
    """The forward of one module.

    Args:
        name: Of the module, for messages.
        module: Gets the region in place of its forward, unless
        function: is given, a method of it that is computed. The module then calls the region itself.
        config: The options that made it one.
        copies: Where inputs are copied, if they are kept in host memory.
        chunk: The chunk of which it is one layer.
        index: Its index in the chunk.
        stops_early: As the attribute, which is determined if it is `None`.
        is_shared: Whether it is called several times before its backward.
        tiles: Pieces in which its input is computed, each a call of its own; `None`: it is computed as a whole.

    Attributes:
        name: As given.
        enabled: Whether activations are recomputed, or saved as usual.
        function: What is computed, if it is not the forward of the module's class.
        config: As given.
        kept_draws: Which operators that may draw random numbers are kept; `None`: none.
        tiles: As given.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        config: Recompute,
        *,
        copies: HostCopies | None = None,
        chunk: LayerChunk | None = None,
        index: int = 0,
        function: Callable[..., Any] | None = None,
        stops_early: bool | None = None,
        is_shared: bool = False,
        tiles: int | None = None,
    ) -> None:
        self.name = name
        self.enabled = True
        self.config = config
        self.function: Callable[..., Any] | None = function or vars(module).get("forward")
        self.__signature__ = inspect.signature(module.forward)
        self._copies, self._chunk, self._index = copies, chunk, index
        self._module = weakref.ref(module)
        self._routers: list[weakref.ref[Any]] | None = None
        kept = (*config.save_ops, *(CHOICES if routers_in(module) else ()))
        # A compiler takes a function that is there as it is; torch 2.10's cannot use one that is made while it looks.
        self._traced_policy = keeping(kept) if kept else None
        self.kept_draws = drawing(config.save_ops)
        self._has_engine_modules: bool | None = None
        self._keeps_statistics: bool | None = None
        self._stops_early = stops_early
        self._is_shared = is_shared
        self.tiles = tiles
        self._draws = False
        if function is None:
            module.__dict__[_REGION] = self
            module.__dict__["forward"] = self

    def remove(self) -> None:
        """Give the module its own forward again; one that was compiled since stays, and saves all activations."""
        module = self._module()
        if module is None:
            return
        del module.__dict__[_REGION]
        if module.__dict__.get("forward") is not self:  # it was compiled
            self.enabled = False
        elif self.function is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self.function

    def compile(self, **options: Any) -> None:
        """Compute, and recompute, compiled code. The compiler does not see this, so it cannot keep operators."""
        module = self._module()
        function = self.function or MethodType(type(module).forward, module)  # type: ignore[union-attr]
        self.function = torch.compile(function, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        """Region for a copy of the module that is being made. It is in no chunk: the copy may be of one layer alone."""
        module = self._module()
        twin = memo.get(id(module))
        if not isinstance(twin, nn.Module):
            raise EngineStateError(
                f"{self.name}: its forward was copied without its module; copy the module (copy.deepcopy(module))"
            )
        region = Region.__new__(Region)
        region.__dict__.update(self.__dict__)
        region.function = copy.deepcopy(self.function, memo)
        if self._chunk is not None:
            region.config = replace(self.config, num_layers=None)
        region._module, region._routers, region._chunk = weakref.ref(twin), None, None
        return region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's forward, saving only its inputs where a backward may follow."""
        if self.tiles is None or not self.enabled:
            return self._run(None, *args, **kwargs)
        if torch.compiler.is_compiling():
            return in_tiles(self.name, self.tiles, self._run, args, kwargs, saves=False)
        return self._tiled(self.tiles, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _tiled(self, tiles: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_tiles()
        return in_tiles(self.name, tiles, self._run, args, kwargs, saves=torch.is_grad_enabled())

    def _run(self, saved: SavedPiece | None, *args: Any, **kwargs: Any) -> Any:
        """One call, of the whole or of a piece."""
        if not (self.enabled and torch.is_grad_enabled()):
            return self.body(*args, **kwargs)
        if torch.compiler.is_compiling() and self._chunk is None and self._copies is None:
            return self._traced(args, kwargs)
        return self._kept(args, kwargs, saved)

    def body(self, *args: Any, **kwargs: Any) -> Any:
        """What the region computes, as without recomputation."""
        if self.function is not None:
            return self.function(*args, **kwargs)
        module = self._module()
        return type(module).forward(module, *args, **kwargs)  # type: ignore[union-attr]

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside a compiler, which handles recomputation and random numbers. Routes are kept as operators."""
        if self._traced_policy is None:
            return checkpoint(self.body, *args, use_reentrant=False, **kwargs)
        contexts = partial(create_selective_checkpoint_contexts, self._traced_policy)
        return checkpoint(self.body, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _kept(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: SavedPiece | None) -> Any:
        named = {**dict(zip(self.__signature__.parameters, args, strict=False)), **kwargs}
        for name in _CACHES:
            cache = named.get(name)
            # Layers of other libraries may call anything a cache; one that is written to has an update method, and is not a dict of tables.
            if cache is not None and (
                name != "cache" or (callable(getattr(cache, "update", None)) and not isinstance(cache, Mapping))
            ):
                raise EngineStateError(
                    f"{self.name} was given {name}, a cache that its forward writes to, and would write to again in backward; call the "
                    "model with use_cache=False, or set model.config.use_cache = False"
                )
        call = RegionCall(self, args, kwargs, saved)
        if self.has_engine_modules and te.quantizes_now():
            self._check_scales()
            output = te.checkpoint(call, *call.values)
            if te.scales_are_delayed():
                te.keep_scales_in_backward(tensors_in(output))
        else:
            with nullcontext() if saved is None else unnoticed_saves():
                output = checkpoint(
                    call,
                    *call.values,
                    use_reentrant=False,
                    preserve_rng_state=self._keeps_random_state(call.device),
                    early_stop=self.stops_early,
                )
        call.end(output)
        return output

    # -- how it is recomputed ------------------------------------------------------------------------------------------

    @property
    def has_engine_modules(self) -> bool:
        """Whether modules of Transformer Engine are inside. They may have been added after the region, so the first forward checks."""
        if self._has_engine_modules is None:
            module = self._module()
            self._has_engine_modules = module is not None and te.has_engine_modules(module)
            if self._has_engine_modules:
                refuse_operators(self.name, self.config)
        return self._has_engine_modules

    @property
    def stops_early(self) -> bool:
        """Whether recomputation ends with the last tensor that backward needs. Not if ranks communicate inside."""
        if self._stops_early is None:
            module = self._module()
            self._stops_early = self._chunk is None and module is not None and can_stop_early(module)
        return self._stops_early

    def _check_tiles(self) -> None:
        if self.has_engine_modules:
            refuse_tiles(self.name)
        if not self.stops_early:
            raise EngineStateError(
                f"{self.name} is computed in pieces (tiled_modules) and has units of its own inside, which would be all-gathered for each "
                "piece; make it one unit as a whole, or a part of a larger unit"
            )

    def _check_scales(self) -> None:
        if self._chunk is not None and te.scales_are_delayed():
            raise EngineStateError(
                f"{self.name}: with delayed scaling Transformer Engine keeps the scales of one region at a time, and layers of a chunk are "
                'recomputed together; give num_layers=1, or recipe="current"'
            )
        if self._is_shared and te.scales_are_delayed():
            raise EngineStateError(
                f"{self.name}: with delayed scaling Transformer Engine hands the scales of several calls of a layer to their backwards in "
                'the wrong order, and this layer is called for all depths; give recipe="current", shared=False, or recompute=False'
            )

    def _keeps_random_state(self, device: torch.device | None) -> bool:
        """A graph that is being recorded has no state to keep: numbers differ in each replay."""
        if device is None or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return True
        if self._draws:
            raise EngineStateError(
                f"{self.name} draws random numbers (dropout), which a CUDA graph cannot draw a second time in its backward; leave these "
                "modules out of what is recomputed, or dropout, or CUDA graphs"
            )
        return False

    def draw(self, device: torch.device | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute, and determine whether that draws random numbers on the device."""
        if device is None or device.type != "cuda" or self._draws or torch.cuda.is_current_stream_capturing():
            return self.body(*args, **kwargs)
        before = cuda_position(device)
        output = self.body(*args, **kwargs)
        self._draws = before != cuda_position(device)
        return output

    # -- what a call queries --------------------------------------------------------------------------------------------

    def placed(self, tensors: list[Tensor]) -> tuple[Link | None, dict[int, Linked | HostCopy | SavedPiece]]:
        """Inputs that are not simply kept, by position."""
        link, linked = (None, {}) if self._chunk is None else self._chunk.inputs(self._index, tensors)
        places: dict[int, Linked | HostCopy | SavedPiece] = dict(linked)
        for position, tensor in enumerate(tensors if self._copies is not None else ()):
            if position not in places and tensor.requires_grad and not tensor.is_leaf:
                places[position] = HostCopy(tensor, self.name, self._copies)  # type: ignore[arg-type]
        return link, places

    def offer(self, output: Any, results: Results, handle_of_region: Tensor | None, link: Link | None) -> None:
        """Let the next layer of the chunk link to what this one returned."""
        if self._chunk is not None and handle_of_region is not None:
            self._chunk.offer(self._index, tensors_in(output), Link(results, handle_of_region, link))

    @property
    def is_chunked(self) -> bool:
        """Whether a layer after it may link to it."""
        return self._chunk is not None

    @property
    def routers(self) -> list[Any]:
        """Modules inside whose choices are kept."""
        if self._routers is None:
            module = self._module()
            self._routers = [] if module is None else [weakref.ref(router) for router in routers_in(module)]
        return [router for reference in self._routers if (router := reference()) is not None]

    def gather_again(self) -> None:
        """Inside a backward, have the weights of the module's units unsharded for a repeated forward."""
        module = self._module()
        if module is not None:
            gather_again(module)

    def statistics_counted_once(self) -> AbstractContextManager[None]:
        """Context around a forward that runs again, in which norms do not count a batch a second time."""
        module = self._module()
        if self._keeps_statistics is None:  # determined once, since most have none
            self._keeps_statistics = module is not None and keeps_statistics(module)
        return counted_once(module) if module is not None and self._keeps_statistics else nullcontext()

    def snapshot(self) -> PrecisionSnapshot:
        """The contexts of the current precision."""
        return PrecisionSnapshot(with_engine=self.has_engine_modules)


class RegionCall:
    """One call of a region: first in forward, then in each backward that needs it.

    The checkpoint keeps it alive, so it holds no tensor itself.

    Args:
        region: The region.
        args: Of its forward.
        kwargs: Of its forward.
        saved: The only tensor among them, if it is saved already.

    Attributes:
        values: The arguments of its forward: tensors, and stand-ins for those that are not simply kept.
        device: Of the first of these tensors.
    """

    def __init__(
        self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any], saved: SavedPiece | None = None
    ) -> None:
        self._region = region
        self._first_arguments: tuple[Any, Any] | None = (args, kwargs)
        self._results = Results()
        self._handle: Tensor | None = None
        self._precision = region.snapshot()
        self._routers = region.routers
        self._choices = KeptChoices(len(self._routers))
        save_ops = region.config.save_ops
        self._modes = create_selective_checkpoint_contexts(keeping(save_ops)) if save_ops else None
        tensors: list[Tensor] = []
        self._outline = outlined((args, kwargs), tensors)
        self._link, places = region.placed(tensors)
        if saved is not None:
            places = {0: saved}
        self._copies = tuple(place for place in places.values() if isinstance(place, HostCopy))
        self.device = tensors[0].device if tensors else None
        self._draws = KeptDraws(region.kept_draws, self.device)
        # PyTorch takes the device of random numbers from the tensors among its arguments.
        self._marks = [tensors[0].detach().new_empty(0)] if tensors else []
        self.values = [*self._marks, *(places.get(position, tensor) for position, tensor in enumerate(tensors))]

    def __call__(self, *values: Any) -> Any:
        """The forward, or the repeated forward."""
        first_arguments, self._first_arguments = self._first_arguments, None
        again = first_arguments is None
        args, kwargs = first_arguments or filled(self._outline, [_taken(value) for value in values[len(self._marks) :]])
        with ExitStack() as stack:
            if again:
                self._settle()
                stack.enter_context(self._precision.entered())
                stack.enter_context(self._region.statistics_counted_once())
            if self._modes is not None or self._region.tiles is not None:
                # With tiles, so that what pieces contribute to the gradient of a weight is added up in the weight's dtype.
                stack.enter_context(uncached_casts())
            if self._modes is not None:
                stack.enter_context(self._modes[again])
                stack.enter_context(self._draws.around(again=again))
            if self._routers:
                stack.enter_context(self._choices.around(self._routers, again=again))
            own_handle = handle() if self._region.is_chunked else None
            if again:
                output = self._region.body(*args, **kwargs)
                self._results.note(tensors_in(output))
            else:
                self._handle = own_handle
                output = self._region.draw(self.device, args, kwargs)
        return output

    def _settle(self) -> None:
        """Before a repeated forward: let the previous layer's results go, which were read, and have weights gathered."""
        if self._link is not None:
            self._link.taken()
        self._region.gather_again()

    def end(self, output: Any) -> None:
        """After the first forward: send inputs to host memory, and let the next layer link to this one."""
        own_handle, self._handle = self._handle, None
        copies, self._copies, self.values = self._copies, (), []
        for copied in copies:
            copied.send()
        if self._link is not None:
            self._link.used()
        self._region.offer(output, self._results, own_handle, self._link)


def _taken(value: Any) -> Tensor:
    return value.take() if isinstance(value, (Linked, HostCopy, SavedPiece)) else value


def can_stop_early(module: nn.Module) -> bool:
    """Whether ranks do not communicate inside a module, so that each may stop where it has what it needs."""
    return not any(_communicates(part) for part in list(module.modules())[1:])


def _communicates(module: nn.Module) -> bool:
    """Whether ranks wait for each other in its forward."""
    return is_sharded(module) or isinstance(module, nn.SyncBatchNorm) or getattr(module, "dispatcher", None) is not None
