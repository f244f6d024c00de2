"""Tensors whose rows are distributed according to a layout, and not in the equal parts that DTensor assumes.

Sharded parameters are such tensors (sharded_parameter.py), and so are their gradients and the results of elementwise operations on them.

Elementwise operations and reductions to one number need no positions and are left to DTensor. Everything else is refused before it
runs: DTensor would silently take the wrong rows, or wait for ranks that have none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.base.stand_in import StandIn
from lightning_mfsdp.engine.core.number import Number
from lightning_mfsdp.engine.core.outside import (
    gradients_to_weights,
    needs_whole,
    use_whole,
    write_in_whole,
    writes_in_place,
)
from lightning_mfsdp.engine.core.piece import Piece
from lightning_mfsdp.engine.core.placed_tensor import Copied, PlacedTensor
from lightning_mfsdp.engine.core.saved_piece import chunk_memory, chunks_to_read, items_to_write
from lightning_mfsdp.engine.core.sharded_arithmetic import (
    LayoutError,
    assign_data,
    refuse_gradient,
    refuse_layout,
    run,
)
from lightning_mfsdp.engine.core.torch_functions import computes, copies, describes, makes_alike, writes_by_position
from lightning_mfsdp.engine.core.whole_view import WholeView, with_views

__all__ = ["Rows"]

# Classes of other operands that handle torch functions in their own way.
_TAKE_PART = (WholeView, StandIn)


class Rows(PlacedTensor):
    """This rank's rows of a tensor, with arithmetic, saving and copying that respect their placement."""

    @property
    def _derived(self) -> type[Rows]:
        return Rows

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused: NumPy has no notion of ranks."""
        raise EngineStateError(
            f"numpy() of parameter {self.described}: this rank has only some of its rows; call value.full_tensor().numpy(), on all ranks"
        )

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.numpy()

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """The whole tensor on every rank, without history; collective. Other placements are refused: DTensor would move wrong rows."""
        same_mesh = device_mesh is None or device_mesh == self.device_mesh
        if not same_mesh or not placements or not all(placement.is_replicate() for placement in placements):
            refuse_layout("redistribute", self)
        return DTensor.from_local(self.full_tensor(), self.device_mesh, list(placements), run_check=False)

    # -- saving and copying --------------------------------------------------------------------------------------------

    @property
    def _piece(self) -> Piece:
        """Where its numbers lie."""
        piece = self.lies.piece
        return piece if self.shape == piece.shape else Piece(shape=self.shape, rows=piece.rows, parts=piece.parts)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return items_to_write(fqn, self._local_tensor, self._piece)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return chunks_to_read(self._piece)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return chunk_memory(index, self._local_tensor, self._piece)

    def take_assigned(self) -> None:
        """Copy what was assigned to the `data` of another representation; only parameters have one."""

    def apply_(self, function: Callable[[Any], Any]) -> Any:
        """As of any tensor on CPU: `function` is called with every number of this rank's rows."""
        self._local_tensor.apply_(function)
        self.note_write()
        return self

    def map_(self, other: Tensor, function: Callable[[Any, Any], Any]) -> NoReturn:
        """Refused: rows of another tensor would have to lie where these do."""
        refuse_layout("map_", self)

    def data_ptr(self) -> int:
        """0: the memory is that of `to_local()`. PyTorch would return the offset of these rows in it."""
        return 0

    def new_empty(self, *size: Any, **options: Any) -> Tensor:
        """A tensor of this shape, distributed as this one; other shapes are refused."""
        wanted = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        if tuple(wanted) != tuple(self.shape):
            refuse_layout("new_empty", self)
        made: Rows = Rows.over(self._local_tensor.new_empty(self._local_tensor.shape, **options), self)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return Rows.over(copy.deepcopy(self._local_tensor.detach(), memo), self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        what, instead = "parameter", "full_state_dict(module)"
        if not self.shows_weight:
            what = "optimizer state, or another tensor, of parameter"
            instead = "get_optimizer_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))"
        raise EngineStateError(
            f"{what} {self.described}: sharded tensors cannot be pickled (torch.save), because each rank has rows of its own; "
            f"save {instead}, called on all ranks, use torch.distributed.checkpoint, or call unshard_model(module) first"
        )

    def __tensor_flatten__(self) -> Any:
        """For callers that flatten subclasses; torch.compile would reassemble a DTensor of equal parts."""
        if compat.is_traced():
            raise EngineStateError(
                f"torch.export or torch.compile traces the sharded rows of parameter {self.described}, and its code would assume equal "
                "parts; call unshard_model(module) before an export, and give compiled functions value.to_local(). An optimizer whose step "
                "is compiled and treats every number by itself works on plain rows: fully_shard_optimizer(optimizer, elementwise=True)"
            )
        return super().__tensor_flatten__()

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == compat.set_data:
            return assign_data(args[0], args[1])
        kwargs = kwargs or {}
        if describes(func):  # called for every parameter in every step, so it does not use the mode
            with compat.without_torch_function():
                return func(*args, **kwargs)
        if any(issubclass(kind, _TAKE_PART) for kind in types):
            if any(issubclass(kind, StandIn) for kind in types):
                return NotImplemented  # it calls again, with the tensor that it stands for
            with with_views(func, args, kwargs) as (_, args, kwargs):
                return cls._called(func, args, kwargs)
        return cls._called(func, args, kwargs)

    @classmethod
    def _called(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_inference_mode_enabled() and getattr(func, "__name__", "") in ("detach", "__getitem__"):
            # An inference tensor cannot share the version counter of the tensor that it views.
            with torch.inference_mode(False), torch.no_grad():
                return cls._called(func, args, kwargs)
        if not makes_alike(func):
            for one in tensors_in((args, kwargs)):
                if isinstance(one, Rows):
                    one.take_assigned()
        if func is torch.autograd.grad:
            return gradients_to_weights(func, args, kwargs)
        if computes(func):
            in_place = writes_in_place(func, args, kwargs)
            if in_place and writes_by_position(func):
                return write_in_whole(func, args, kwargs)
            if not in_place and needs_whole(tensors_in((args, kwargs))):
                return use_whole(func, args, kwargs)
        try:
            with compat.without_torch_function(), _Checked():
                result = func(*args, **kwargs)
        except LayoutError:
            if writes_in_place(func, args, kwargs) or _are_stepped(args, kwargs):
                raise  # an optimizer would gather whole weights in every step
            return use_whole(func, args, kwargs)
        if copies(func) and isinstance(result, Rows) and result is not args[0] and result.requires_grad:
            given = args[0]
            parameter = given.copied.parameter if given.copied is not None else given
            result.copied = Copied(parameter, result.grad_fn)
        if isinstance(result, Number) and result.requires_grad:
            described = next(one.described for one in tensors_in((args, kwargs)) if isinstance(one, Rows))
            result.register_hook(lambda _: refuse_gradient(described))
        return result


def _are_stepped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(one, Rows) and bool(one.stepping) for one in tensors_in((args, kwargs)))


class _Checked(compat.DispatchMode):
    """Inside, every operation on rows is ours, including those that a composite function calls.

    A mode and not `Rows.__torch_dispatch__`, which DTensor's own dispatch in torch 2.11 bypasses.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, Rows)]
        return run(func, args, kwargs, operands) if operands else func(*args, **kwargs)
