"""Every private or version-dependent PyTorch API the package uses, in one place.

Those that differ say from which version on. `tests/engine/test_compat.py` fails when one of them disappears.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import inspect
import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F
from torch import Tensor, nn
from torch import _ops as operators
from torch._C import DispatchKey
from torch._C import _distributed_c10d as distributed_types
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._guards import CompileContext
from torch._subclasses import fake_tensor
from torch.autograd import Variable, forward_ad, graph
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint import filesystem
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules import module as module_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

__all__ = [
    "IGNORED_BY_DDP",
    "BatchNorm",
    "DispatchMode",
    "OpOverload",
    "OwnShard",
    "PrefixStore",
    "Store",
    "abort_process_groups",
    "accumulates",
    "all_gather_coalesced",
    "all_gather_flat",
    "all_reduce_coalesced",
    "allows_saved_tensors_hooks",
    "apply_to_tensors",
    "as_kind",
    "at_all_levels",
    "averages",
    "backward_task",
    "before_other_hooks",
    "carries_data",
    "ddp_ignores",
    "default_store",
    "equal_part",
    "finished_work",
    "foreach_add_",
    "foreach_copy_",
    "foreach_lerp",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_unscale_",
    "foreach_zero_",
    "free_after_work_so_far",
    "get_data",
    "give_accumulation_hooks",
    "group_of",
    "grouped_mm",
    "has_accumulation_hooks",
    "has_global_hooks",
    "has_hooks",
    "has_inner_tensors",
    "in_function_forward",
    "in_transform",
    "is_composite",
    "is_due",
    "is_lost_connection",
    "is_profiled",
    "is_traced",
    "is_transformed",
    "keeps_graph",
    "load_code",
    "memory_of",
    "new_group",
    "no_symmetric_memory_because",
    "on_backward_end",
    "outside_transforms",
    "overloads_of",
    "premul_sum",
    "reduce_op_of",
    "reduce_scatter_coalesced",
    "reduce_scatter_flat",
    "saved_tensors_hooks_around",
    "scaled_mm",
    "set_data",
    "set_versions",
    "share_storage",
    "step_pre_hooks",
    "storage_info",
    "storage_of",
    "storage_users",
    "symmetric_memory",
    "take_accumulation_hooks",
    "takes_closure",
    "timed_out_after",
    "undecorated_step",
    "untraced",
    "uses_nccl",
    "version_of",
    "without_torch_function",
    "zero_cta_group",
]

T = TypeVar("T")
TensorT = TypeVar("TensorT", bound=Tensor)
OpOverload = operators.OpOverload  # one operator with its types (torch 2.11 to 2.15)
BatchNorm = _BatchNorm  # the class that all layers of this kind derive from (torch 2.11 to 2.15)
DispatchMode = TorchDispatchMode  # sees every operation before it runs, of subclasses too (torch 2.11 to 2.15)

# torch.distributed exports them too, but type checkers do not see them there.
Store = distributed_types.Store
PrefixStore = distributed_types.PrefixStore


def overloads_of(packet: object) -> list[OpOverload]:
    """All overloads of an operator that have a kernel; none if it is no operator. Some of PyTorch's scripted operators have none."""
    if not isinstance(packet, operators.OpOverloadPacket):
        return []
    overloads = (getattr(packet, name) for name in packet.overloads())
    return [overload for overload in overloads if torch._C._dispatch_has_kernel(overload.name())]


def is_composite(operator: OpOverload) -> bool:
    """Whether it is a composite of other operators, which are dispatched in its place."""
    return bool(operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


# Identity of the backward now running in this thread, or -1 (torch 2.11 to 2.15). Called several times for each unit, so not wrapped.
backward_task: Callable[[], int] = torch._C._current_graph_task_id


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward now running has finished; valid only inside one (`queue_callback`)."""
    Variable._execution_engine.queue_callback(callback)


def keeps_graph() -> bool:
    """Whether the backward now running was asked to retain the graph (torch 2.11 to 2.15: `_get_current_graph_task_keep_graph`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def in_function_forward() -> bool:
    """Whether the forward of an autograd function written in Python runs: it, and inference mode, turn forward-mode gradients off as well.

    torch 2.11 to 2.15: `_is_fwd_grad_enabled`.
    """
    return not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def accumulator_of(leaf: Tensor) -> Node:
    """The node at which gradients of `leaf` arrive. No operation of a class of the leaf's own is called, as `get_gradient_edge` would."""
    if in_transform():  # no function written in Python can be applied
        return get_gradient_edge(leaf).node
    with torch.enable_grad():
        reached = _Leading.apply(leaf)
    return reached.grad_fn.next_functions[0][0]  # type: ignore[no-any-return]


class _Leading(torch.autograd.Function):
    """Something whose graph leads to a tensor."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def accumulates(leaf: Tensor) -> bool:
    """Whether the backward now running accumulates into `leaf.grad` instead of returning the gradient."""
    return _brings(accumulator_of(leaf))


def leaves_gradients_out() -> bool:
    """Whether the backward now running computes only selected gradients (`autograd.grad`, `inputs=`) and skips others of its graph.

    `_current_autograd_node`, torch 2.11 to 2.15. It walks the graph from there to the first leaf that is left out, or whose gradient is
    returned.
    """
    seen: set[Node] = set()
    coming: list[Node | None] = [torch._C._current_autograd_node()]
    while coming:
        node = coming.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [earlier for earlier, _ in node.next_functions if earlier is not None]
        if not (following or _brings(node)):
            return True
        coming += following
    return False


def _brings(leaf: Node) -> bool:
    try:
        return is_due(leaf)
    except RuntimeError:  # refuses leaves whose gradient is returned
        return False


def is_due(node: Node) -> bool:
    """Whether the backward now running reaches, or has reached, a node (torch 2.11 to 2.15: `_will_engine_execute_node`)."""
    return bool(torch._C._will_engine_execute_node(node))


def group_of(argument: Any) -> dist.ProcessGroup:
    """The process group that an operator of torch.distributed was given (torch 2.11 to 2.15: `ProcessGroup.unbox`)."""
    return dist.ProcessGroup.unbox(argument)


def reduce_op_of(argument: Any) -> Any:
    """The reduction that such an operator was given, to compare with those of `dist.ReduceOp` (torch 2.11 to 2.15)."""
    return argument.op()


def finished_work() -> Any:
    """What such an operator returns of work that is done (torch 2.11 to 2.15: `FakeWork`, `Work.boxed`)."""
    return distributed_types.Work.boxed(distributed_types.FakeWork())


def is_profiled() -> bool:
    """Whether a profiler of torch is recording in this thread (torch 2.11 to 2.15: `_profiler_enabled`)."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def has_accumulation_hooks(leaf: Tensor) -> bool:
    """Whether something runs after a gradient was added to `leaf.grad` (torch 2.11 to 2.15: `_post_accumulate_grad_hooks`)."""
    return bool(leaf._post_accumulate_grad_hooks)


def take_accumulation_hooks(leaf: Tensor) -> OrderedDict[int, Callable[[Any], None]]:
    """What `leaf.register_post_accumulate_grad_hook` was given, and that it runs no longer; handles remove hooks from what is returned.

    torch 2.11 to 2.15: `_post_accumulate_grad_hooks`, of which a new dictionary replaces what autograd runs, and `None` does not.
    """
    hooks = cast("OrderedDict[int, Callable[[Any], None]]", leaf._post_accumulate_grad_hooks or OrderedDict())
    if hooks:
        leaf._post_accumulate_grad_hooks = OrderedDict()
    return hooks


def give_accumulation_hooks(leaf: Tensor, hooks: OrderedDict[int, Callable[[Any], None]]) -> None:
    """Have `leaf` run what `take_accumulation_hooks` returned (torch 2.11 to 2.15: `_post_accumulate_grad_hooks`)."""
    leaf._post_accumulate_grad_hooks = hooks


def allows_saved_tensors_hooks() -> bool:
    """Whether hooks can be put around what autograd saves; inside `torch.func.grad` they cannot.

    torch 2.11 to 2.15: `_saved_tensors_hooks_is_enabled`.
    """
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def saved_tensors_hooks_around() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """What packs and unpacks saved tensors here, innermost (torch 2.11 to 2.15: `_top_saved_tensors_default_hooks`)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_transformed() -> bool:
    """Whether functorch or forward-mode differentiation is active (torch 2.11 to 2.15)."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


# Whether code runs inside `torch.func.grad` and the like, or in their backward; asked for in every forward, so it is no function of ours.
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active  # torch 2.11 to 2.15


def outside_transforms(function: Callable[..., None], *args: Any) -> None:
    """Call a function that computes with plain tensors, inside `torch.func.grad` and the like (torch 2.11 to 2.15: `_DisableFuncTorch`)."""
    with torch._C._DisableFuncTorch():
        function(*args)


def at_all_levels(tensor: Tensor) -> list[Tensor]:
    """A tensor inside `vmap`, `torch.func.grad` and the like, and those that it wraps, each with its own graph (torch 2.11 to 2.15)."""
    levels = [tensor]
    while torch._C._functorch.is_functorch_wrapped_tensor(levels[-1]):
        levels.append(torch._C._functorch.get_unwrapped(levels[-1]))
    return levels


# A context in which tensor subclasses behave as if they did not override `__torch_function__`.
without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool) -> None:
    """Apply what `module.to(...)` and the like do to a module's tensors, by the rule of its class."""
    # Recurrent layers would look up their flat weights, which belong to the unsharded parameters and stay.
    inherited: Any = nn.Module._apply if isinstance(module, nn.RNNBase) else type(module)._apply
    inherited(module, function, recurse)


# Where DistributedDataParallel reads, before anything else, the names that it must ignore.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


class OwnShard(Shard):
    """A placement for a tensor of which each rank holds what a layout says: DTensor's own functions query it for what this rank has.

    Args:
        dim: That is split.
        extent: Returns what of the whole tensor lies here along it, or raises if that is not consecutive.
        is_first: Of several axes that split the dim, the first reports for all.
        owner: A weak reference and a number, of what is distributed in this way. DTensor keeps placements of results by equal ones of
            operands, for as long as the process lives, so those of different owners differ, and none keeps memory.
    """

    def __init__(
        self, dim: int, extent: Callable[[], range], *, is_first: bool, owner: tuple[weakref.ref[Any], int]
    ) -> None:
        super().__init__(dim)
        self._extent, self._is_first, self.owner = extent, is_first, owner

    def __eq__(self, other: object) -> bool:
        alike = isinstance(other, Shard) and super().__eq__(other)
        return alike and (not isinstance(other, OwnShard) or other.owner == self.owner)

    def __hash__(self) -> int:
        return hash((super().__hash__(), id(self.owner[0]), self.owner[1]))

    def _local_shard_size_and_offset(self, curr_local_size: Any, num_chunks: int, rank: Any) -> Any:
        if not self._is_first:
            return curr_local_size, 0
        extent = self._extent()
        return len(extent), extent.start


get_data: Callable[[Tensor], Tensor] = torch.Tensor.data.__get__  # type: ignore[attr-defined] # `parameter.data` of a plain parameter
set_data: Callable[[Tensor, Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined] # `parameter.data = value`

# The version counter of a tensor, which its views share; and the way to set those of several (torch 2.10 to 2.14).
version_of: Callable[[Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]
set_versions: Callable[..., None] = torch._C._autograd._unsafe_set_version_counter


def memory_of(tensor: Tensor) -> int | None:
    """Which storage a strided tensor lies in, or this rank's part of a DTensor; `None` of other wrappers around tensors.

    Addresses do not tell where tensors have no memory. torch 2.11 to 2.15: `is_functorch_wrapped_tensor`, `_cdata`.
    """
    inner = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    wraps = hasattr(type(inner), "__tensor_flatten__") or torch._C._functorch.is_functorch_wrapped_tensor(inner)
    return None if wraps else storage_of(inner)


def storage_of(plain: Tensor) -> int:
    """The same of a tensor that is no wrapper, in a fifth of the time."""
    number: int = plain.untyped_storage()._cdata
    return number


def as_kind(kind: type[TensorT], tensor: Tensor) -> TensorT:
    """A tensor of a subclass of `Tensor` over the memory of another one, without history (torch 2.11 to 2.15: `_make_subclass`).

    One without memory is a Python object of another class for good, so a tensor of one element stands for it.
    """
    if is_without_memory(tensor):
        with _disable_current_modes():
            tensor = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return torch.Tensor._make_subclass(kind, tensor)


def all_gather_flat(output: Tensor, piece: Tensor, group: dist.ProcessGroup) -> None:
    """Gather equal flat pieces (the process group's own method: `_allgather_base`, from torch 2.13 `all_gather_single`)."""
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    _wait(gather(output, piece, _gather_options()))


@functools.cache
def _gather_options() -> AllgatherOptions:
    """Created once: filling them takes a tenth of a call's host time."""
    options = AllgatherOptions()
    options.asyncOp = False
    return options


def all_gather_coalesced(outputs: Sequence[Tensor], pieces: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """`all_gather_flat` for several, as one operation where the backend can; the name changed in torch 2.13, where the old one warns."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with _coalesced(group, outputs[0].device):
        for output, piece in zip(outputs, pieces, strict=True):
            gather(output, piece, group=group)


def all_reduce_coalesced(tensors: Sequence[Tensor], op: Any, group: dist.ProcessGroup) -> None:
    """Sum each tensor over the ranks, in place; as one operation where there are several and the backend can."""
    with _coalesced(group, tensors[0].device) if len(tensors) > 1 else nullcontext():
        for tensor in tensors:
            dist.all_reduce(tensor, op=op, group=group)


def reduce_scatter_flat(piece: Tensor, source: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """Reduce a flat tensor and keep this rank's piece (`_reduce_scatter_base`, from torch 2.13 `reduce_scatter_single`)."""
    scatter = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
    plain = isinstance(op, dist.ReduceOp.RedOpType)
    _wait(scatter(piece, source, _plain_scatter_options(op) if plain else _scatter_options(op)))


def _scatter_options(op: Any) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = False
    return options


# Not for operations with a factor: they compare equal whatever it is.
_plain_scatter_options = functools.cache(_scatter_options)


def reduce_scatter_coalesced(
    pieces: Sequence[Tensor], sources: Sequence[Tensor], op: Any, group: dist.ProcessGroup
) -> None:
    """`reduce_scatter_flat` for several, as one operation where the backend can."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with _coalesced(group, pieces[0].device):
        for piece, source in zip(pieces, sources, strict=True):
            scatter(piece, source, op=op, group=group)


def _wait(work: dist.Work | None) -> None:
    """Wait for the work that a backend returns; some wait by themselves and return none."""
    if work is not None:
        work.wait()


def _coalesced(group: dist.ProcessGroup, device: torch.device) -> AbstractContextManager[Any]:
    return c10d._coalescing_manager(group, device=device) if uses_nccl(group, device) else nullcontext()


def uses_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL handles tensors of this device; a group's backend may be unnamed or a list such as "cpu:gloo,cuda:nccl"."""
    return device.type == "cuda" and dist.get_backend(group) not in ("gloo", "mpi", "ucc", "fake")


def carries_data(group: dist.ProcessGroup) -> bool:
    """Whether ranks of a group exist; the fake backend simulates them and moves nothing."""
    return bool(dist.get_backend(group) != "fake")


def init_group_of_absent_ranks(rank: int, world_size: int) -> None:
    """A default process group whose other ranks do not exist: collectives return at once and move nothing (torch 2.11 to 2.15: "fake")."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", rank=rank, world_size=world_size)


def tensors_without_memory() -> AbstractContextManager[Any]:
    """New tensors have a shape, a dtype and a device, and operations compute these alone (torch 2.11 to 2.15: `FakeTensorMode`)."""
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def backward_under_function_modes(loss: Tensor) -> None:
    """`loss.backward()`, in which modes for torch functions stay active (torch 2.11 to 2.15: `_engine_run_backward`)."""
    graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def is_without_memory(tensor: Tensor) -> bool:
    """Whether a tensor was made inside of `tensors_without_memory`."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def needs_values_because(error: BaseException) -> str:
    """The operation that cannot be computed without values; empty for other errors (torch 2.11 to 2.15: exceptions of fake tensors)."""
    kinds = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
    return str(error.func) if isinstance(error, kinds) else ""


# Reads of one number by the host: `item`, `tolist`, `bool` (torch 2.11 to 2.15).
READS_NUMBER = torch.ops.aten._local_scalar_dense.default
NumberWithoutValue = fake_tensor.DataDependentOutputException


def storage_info(file: str, offset: int, length: int, transforms: Any = None) -> Any:
    """Where a chunk lies, as tables of contents have it (torch 2.11 to 2.15: `filesystem._StorageInfo`)."""
    return filesystem._StorageInfo(file, offset, length, transforms)


def default_store() -> Store:
    """The store of the default process group (torch 2.11 to 2.15: `_get_default_store`)."""
    return c10d._get_default_store()


def averages(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether the backend divides by the number of ranks. The fake backend, which stands in for NCCL, accepts any operation."""
    return uses_nccl(group, torch.device(device_type)) or dist.get_backend(group) == "fake"


_OLDEST_NCCL_WITH_COPY_ENGINES = (2, 28)


def no_symmetric_memory_because(device: torch.device) -> str:
    """Why gathers cannot use symmetric memory here; empty if they can (torch 2.11 to 2.15: `_symmetric_memory`)."""
    version = torch.cuda.nccl.version()
    if version < _OLDEST_NCCL_WITH_COPY_ENGINES:
        return f"copy-engine gathers came with NCCL 2.28, this is {'.'.join(map(str, version))}"
    if not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"):
        return "this build of PyTorch cannot set NCCL's CTA policy"
    backend = symm_mem.get_backend(device)
    if backend not in (None, "CUDA", "NCCL"):
        return f"symmetric memory is already provided by {backend}, and NCCL is needed"
    return ""


def zero_cta_group(ranks: list[int]) -> dist.ProcessGroup:
    """A communicator that leaves the compute cores alone where it can. Collective over `ranks`.

    Not for use on the default stream: there CUDA refuses the batched copies that NCCL 2.28 issues ("invalid argument").
    """
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
    return new_group(ranks, pg_options=options)


def new_group(ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """`dist.new_group` with this rank in it. Collective over `ranks`, or over all. From torch 2.15 on its type has what others get, too."""
    return cast(dist.ProcessGroup, dist.new_group(ranks, use_local_synchronization=ranks is not None, **options))


def symmetric_memory(size_bytes: int, device: torch.device, group: dist.ProcessGroup) -> Tensor:
    """`[size_bytes]` uint8 registered as symmetric memory on all ranks of `group`. Collective; sizes must agree."""
    symm_mem.set_backend("NCCL")
    dist.barrier(group=group, device_ids=[device.index])  # the communicator must exist
    memory = symm_mem.empty(size_bytes, dtype=torch.uint8, device=device)
    symm_mem.rendezvous(memory, group=group.group_name)
    return memory


class _Abort:
    """Aborts what runs in all process groups, and forgets them, without waiting (torch 2.11 to 2.15: `_abort_process_group`).

    NCCL may hang in this where ranks are connected by sockets and another one has closed its end (seen with torch 2.11). Where it lets
    other threads run meanwhile, callers go on after half a second; where it does not, the process ends after two seconds, with exit
    code 1. The timer for that is faulthandler's, so a `dump_traceback_later` set elsewhere no longer fires.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a failure is often detected in two threads
        self._thread: threading.Thread | None = None

    def __call__(self) -> bool:
        """Whether the abort has finished. If not, work on the GPU may never end."""
        if dist.is_initialized() and dist.get_backend() in ("gloo", "mpi"):
            c10d._abort_process_group()
        with self._lock:
            if dist.is_initialized():
                self._wait()
        return not dist.is_initialized()

    def _wait(self) -> None:
        if sys.__stderr__ is not None:
            with suppress(ValueError, OSError):  # it is closed
                faulthandler.dump_traceback_later(_HELD_S, exit=True, file=sys.__stderr__)  # needs no interpreter
        try:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=c10d._abort_process_group, name="mfsdp-abort", daemon=True)
                self._thread.start()
            self._thread.join(_ABORT_S)
        except RuntimeError:  # at shutdown Python 3.12 starts no threads
            c10d._abort_process_group()
        finally:
            faulthandler.cancel_dump_traceback_later()


abort_process_groups = _Abort()
_ABORT_S = 0.5  # more than an abort takes
_HELD_S = 2.0  # for a thread that holds the interpreter

# Messages of backends and the store when a rank is gone or does something else. Gloo raises plain RuntimeErrors.
_LOST = re.compile(
    "gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting|process group|communicator",
    re.IGNORECASE,
)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error of a collective means that other ranks did not join it."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, (RuntimeError, ValueError)) and _LOST.search(str(error)) is not None
    )


# Gloo: "Timed out waiting 20000ms for recv operation". The store: "wait timeout after 20000ms". NCCL: "Timeout(ms)=20000".
_TIMED_OUT = re.compile(r"timed out waiting (\d+) ?ms|timeout after (\d+) ?ms|timeout\(ms\)=(\d+)", re.IGNORECASE)


def timed_out_after(error: BaseException) -> float | None:
    """Seconds that a collective waited before it failed; `None` where it was not a time-out that failed it (torch 2.11 to 2.15)."""
    match = _TIMED_OUT.search(str(error))
    return None if match is None else int(next(filter(None, match.groups()))) / 1000


def undecorated_step(kind: type[Optimizer]) -> Callable[..., Any] | None:
    """What `step` of an optimizer's class does between its hooks; `None` if PyTorch did not wrap it with hooks.

    torch 2.11 to 2.15: `profile_hook_step` wraps the class's `step` and marks it `hooked`.
    """
    step = kind.step
    return getattr(step, "__wrapped__", None) if getattr(step, "hooked", False) else None


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer's own `step` has a closure among its arguments; also False if `undecorated_step` finds none."""
    step = undecorated_step(type(optimizer))
    return step is not None and "closure" in inspect.signature(step).parameters


def step_pre_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """What runs before each step of an optimizer (torch 2.11 to 2.15: `_optimizer_step_pre_hooks`, an ordered dictionary).

    Nothing for one that wraps another and has only `param_groups`.
    """
    return list(getattr(optimizer, "_optimizer_step_pre_hooks", {}).values())


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks can be registered with an optimizer: not with one whose constructor does not call `Optimizer.__init__`."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "_optimizer_state_dict_pre_hooks")


def before_other_hooks(handle: RemovableHandle) -> None:
    """Let a hook run before those that were registered earlier (torch 2.11 to 2.15: `hooks_dict_ref`, an ordered dictionary)."""
    hooks = handle.hooks_dict_ref()
    assert hooks is not None, "the hooked object is alive"
    hooks.move_to_end(handle.id, last=False)


def equal_part(tensor: DTensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Shape and offset of this rank's part of a DTensor (torch 2.11 to 2.15: `compute_local_shape_and_global_offset`)."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return torch.Size(shape), tuple(offset)


def is_traced() -> bool:
    """Whether torch.compile is active here (torch 2.11 to 2.15: `CompileContext`)."""
    return CompileContext.try_get() is not None


def ddp_ignores(module: torch.nn.Module) -> frozenset[str]:
    """Names that DistributedDataParallel was set to ignore (torch 2.11 to 2.15: `_set_params_and_buffers_to_ignore_for_model`)."""
    ignored = getattr(module, IGNORED_BY_DDP, ())
    return frozenset(
        ignored if isinstance(ignored, Collection) else getattr(ignored, "names", ())
    )  # otherwise it is the object that refuses DDP (conversion.py)


def storage_users(tensor: Tensor) -> int:
    """How many tensors share a tensor's memory, itself included (torch 2.11 to 2.15: `_storage_Use_Count`)."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def share_storage(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of one memory, even if it is empty (torch 2.11 to 2.15: `_cdata` of storages)."""
    return tensor is other or bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def free_after_work_so_far(memory: Tensor) -> None:
    """Have CUDA memory, once nothing refers to it, be reused after the work that is on the current stream by then.

    Only for memory that a program refers to longer than the engine does: `record_stream` delays reuse by an unknown time.
    """
    memory.record_stream(torch.cuda.current_stream(memory.device))


def untraced(function: Callable[..., T]) -> Callable[..., T]:
    """As `torch.compiler.disable`, which costs ten more calls where nothing is compiled: so it is called where something is.

    `get_eval_frame_callback` (torch 2.11 to 2.15) is `None` where no function that is called would be compiled.
    """
    disabled: Callable[..., T] = torch.compiler.disable(function)

    @functools.wraps(function)
    def called(*args: Any) -> T:
        if torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None:
            return disabled(*args)
        return function(*args)

    return called


def has_inner_tensors(tensor: Tensor) -> bool:
    """Whether a tensor's class says of what tensors it is made (`__tensor_flatten__`, `__tensor_unflatten__`)."""
    return is_traceable_wrapper_subclass(tensor)


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules (torch 2.11 to 2.15: `_has_any_global_hook`)."""
    return bool(module_hooks._has_any_global_hook())


def premul_sum(factor: float) -> Any:
    """NCCL reduction that multiplies each input by `factor` before the sum, at no extra pass."""
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Products of groups that end at `ends`, int32, on the device (`_grouped_mm`, since torch 2.10 `nn.functional.grouped_mm`)."""
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    result: Tensor = product(left, right, offs=ends)
    return result


_Foreach = Callable[[list[Tensor], list[Tensor]], object]
# Copy tensor by tensor in one launch, converting dtypes. Called for each unit, so not wrapped.
foreach_copy_: _Foreach = torch._foreach_copy_
# Add tensor by tensor in one launch where dtypes agree; the target's dtype is kept.
foreach_add_: _Foreach = torch._foreach_add_


def scaled_mm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """`[M, N]` of `[M, K]`, contiguous, and `[K, N]`, whose transpose is, both in 8 bits; scales are 0-D, float32 (`_scaled_mm`).

    On Hopper `fast` sums keep 14 bits along K; others are added up in float32 every 128 numbers. On CPUs autocast would round some
    products.
    """
    off = torch.autocast("cpu", enabled=False) if left.device.type == "cpu" else nullcontext()
    with off:
        return torch._scaled_mm(
            left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=fast
        )


def foreach_lerp(starts: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Linear interpolation between tensors and their ends, at the fraction `weight`, in one launch."""
    return list(torch._foreach_lerp(list(starts), list(ends), weight))


def foreach_lerp_(targets: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """Move every tensor towards its end by the fraction `weight`, in one launch."""
    torch._foreach_lerp_(list(targets), list(ends), weight)


def foreach_mul_(targets: Sequence[Tensor], factor: Tensor) -> None:
    """Scale every tensor by one device scalar."""
    torch._foreach_mul_(list(targets), factor)


def foreach_unscale_(tensors: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply tensors of one dtype by `inverse_scale`; `found_inf` (0-D) becomes 1 if a number of them is not finite. One launch."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), found_inf, inverse_scale)


def foreach_zero_(targets: Sequence[Tensor]) -> None:
    """Zero every tensor in one launch."""
    torch._foreach_zero_(list(targets))


def foreach_norm(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """Norm of each tensor, 0-D, in one launch per chunk."""
    return torch._foreach_norm(list(tensors), norm_type, dtype)


def load_code(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """What runs before and after a module's own part of `load_state_dict`: hooks, and its `_load_from_state_dict` if that is overridden.

    With torch 2.10 to 2.15: the dictionaries of the hooks.
    """
    before = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    if getattr(module._load_from_state_dict, "__func__", None) is not nn.Module._load_from_state_dict:
        before.append(module._load_from_state_dict)
    return before, list(module._load_state_dict_post_hooks.values())
