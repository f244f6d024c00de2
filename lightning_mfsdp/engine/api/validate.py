"""Refuses modules that cannot be sharded, with the name of the parameter or unit that is the reason."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.part import part_of
from lightning_mfsdp.engine.comm.mesh import Mesh, are_alike
from lightning_mfsdp.engine.core.codec import WeightCodec
from lightning_mfsdp.engine.core.policy import MixedPrecisionPolicy

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.context import Context
    from lightning_mfsdp.engine.core.unit import Unit

__all__ = [
    "Named",
    "check_same_model",
    "refuse_ignored_parts",
    "refuse_other_mesh",
    "refuse_parts",
    "refuse_shared_memory",
    "refuse_unfit",
]

# A parameter with its first name and all the places that hold it: the `_parameters` table of a module and the key in it.
Named = tuple[str, nn.Parameter, list[tuple[dict[str, Any], str]]]


def refuse_unfit(module: nn.Module, named: Sequence[Named], policy: MixedPrecisionPolicy) -> None:
    """Refuse parameters that cannot be sharded under a policy, and modules that reduce gradients by themselves.

    Raises:
        ShardingError: With the name of the first one.
    """
    for path, child in module.named_modules():
        if isinstance(child, (FullyShardedDataParallel, DistributedDataParallel)):
            raise ShardingError(
                f"fully_shard: {path or 'the module'} of {type(module).__name__} is wrapped in {type(child).__name__}, which gathers or "
                "reduces by itself; expected plain modules. Leave the wrapper out"
            )
        if isinstance(child, FSDPModule):
            raise ShardingError(
                f"fully_shard: {path or 'the module'} of {type(module).__name__} was given to torch.distributed.fsdp.fully_shard; expected "
                "plain modules. Leave out the lines that call it, in configure_model for example: the strategy shards the model itself"
            )
    for name, parameter, _ in named:
        where = f"fully_shard: parameter {name} of {type(module).__name__}"
        if isinstance(parameter, DTensor):
            raise ShardingError(
                f"{where} is a DTensor already (tensor parallel or FSDP2); expected a plain tensor. Shard it with one "
                "engine only"
            )
        computes = parameter.is_floating_point() or parameter.dtype in (torch.complex64, torch.complex128)
        if not computes and (parameter.requires_grad or parameter.is_complex()):
            raise ShardingError(
                f"{where} has dtype {parameter.dtype}; expected float64, float32, bfloat16, float16, complex64 or complex128. Convert it "
                "or pass it in ignored_parameters"
            )
        if parameter.is_floating_point() and parameter.element_size() == 1:
            raise ShardingError(
                f"{where} has dtype {parameter.dtype}; 8-bit floats are not supported as parameters. Pass it in "
                "ignored_parameters"
            )
        main = policy.main_params_dtype
        if parameter.dtype is torch.float64 and parameter.requires_grad and main not in (None, torch.float64):
            raise ShardingError(
                f"{where} is float64, and main_params_dtype={main} would lose precision; expected torch.float64. "
                "Pass MixedPrecisionPolicy(main_params_dtype=torch.float64, main_grads_dtype=torch.float64)"
            )

        codec = policy.codec_for(parameter)
        if codec is not None:
            _refuse_unfit_for_codec(where, parameter, codec, main)

    written = {id(parameter): name for name, parameter, _ in named}
    for child in module.modules():
        if (
            isinstance(child, (nn.Embedding, nn.EmbeddingBag))
            and child.max_norm is not None
            and id(child.weight) in written
        ):
            raise ShardingError(
                f"fully_shard: parameter {written[id(child.weight)]} of {type(module).__name__} belongs to an embedding with "
                f"max_norm={child.max_norm}, which rescales rows while it looks them up; what forward writes into a gathered "
                "weight is lost. Leave max_norm out and bound the rows that are looked up, or those of the main weight after a step"
            )


def _refuse_unfit_for_codec(where: str, parameter: nn.Parameter, codec: WeightCodec, main: torch.dtype | None) -> None:
    if main is None and parameter.requires_grad:
        raise ShardingError(
            f"{where} is quantized, and an optimizer's small steps would be lost in its {codec.storage_dtype} values; expected a main "
            "weight beside it. Pass MixedPrecisionPolicy(main_params_dtype=torch.float32)"
        )
    if reason := codec.why_not(parameter):
        raise ShardingError(f"{where} cannot be sharded as it is stored: {reason}")


def refuse_parts(module: nn.Module, named: Sequence[Named], mesh: Mesh) -> None:
    """Refuse parameters without rows on a mesh along which ranks hold different rows, and parts that do not fit the mesh's tensor axis.

    Raises:
        ShardingError: With the name of the first one.
    """
    for name, parameter, _ in named:
        part = part_of(parameter)
        expected = (1, 0) if mesh.tensor is None else (mesh.tensor.size, mesh.tensor.rank)
        if part is not None and (part.size, part.rank) != expected:
            raise ShardingError(
                f"fully_shard: parameter {name} of {type(module).__name__} is part {part.rank} of {part.size} of a larger one, and the "
                f"mesh has {expected[0]} ranks along a tensor axis, of which this is number {expected[1]}; pass the mesh over whose "
                'axis "tensor" the parameter was divided'
            )
        if part is not None and part.local_shape(parameter.shape) != parameter.shape:
            raise ShardingError(
                f"fully_shard: parameter {name} of {type(module).__name__} has shape {tuple(parameter.shape)}, and is marked as one of "
                f"{part.size} parts of dim {part.dim}, of length {sum(part.sections)} in all; something replaced its data after the model "
                "was divided. Load weights before that, or a checkpoint after fully_shard"
            )
    scalars = [name for name, parameter, _ in named if not parameter.dim()]
    if mesh.expert is not None and scalars:
        raise ShardingError(
            f"fully_shard: parameter {scalars[0]} of {type(module).__name__} is a single number, and along the mesh's axis "
            f'"{mesh.expert.name}" every rank holds other rows of each parameter; put it into a module around the experts'
        )


def refuse_ignored_parts(module: nn.Module, ignored: set[int]) -> None:
    """Refuse parts of parameters that are not to be sharded: norms and checkpoints would take each rank's for the whole.

    Raises:
        ShardingError: With the name of the first one.
    """
    for name, parameter in module.named_parameters():
        if id(parameter) in ignored and part_of(parameter) is not None:
            raise ShardingError(
                f"fully_shard: parameter {name} of {type(module).__name__} is among ignored_parameters and a part of a larger one along a "
                "tensor axis, so norms and checkpoints would take this rank's for the whole; leave it out of ignored_parameters, or out of "
                "the plan of the tensor axis"
            )


def refuse_shared_memory(module: nn.Module, ignored: set[int]) -> None:
    """Refuse parameters that are different objects over the same memory: sharding moves each into memory of its own.

    Constants may be shared. Warns of other tensors in that memory that modules hold, which keep their values of now.

    Raises:
        ShardingError: With the names of the first two.
    """
    in_storage: dict[int, list[tuple[range, str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if id(parameter) not in ignored and _lies_in_a_storage(parameter):
            in_storage.setdefault(compat.storage_of(parameter), []).append((_bytes_of(parameter), name, parameter))
    for places in in_storage.values():
        places.sort(key=lambda place: place[0].start)
        reached: list[tuple[range, str, nn.Parameter]] = []  # those that a later one may meet
        for place in places:
            reached = [one for one in reached if one[0].stop > place[0].start]
            for other in reached:
                if (other[2].requires_grad or place[2].requires_grad) and _meet(other[2], place[2]):
                    raise ShardingError(
                        f"fully_shard: parameters {other[1]} and {place[1]} of {type(module).__name__} are two objects over the same "
                        "memory, and sharding would give each its own. Make them one parameter (b.weight = a.weight), or give one a "
                        "copy (b.weight.data = a.weight.data.clone())"
                    )
            reached.append(place)
    for path, child in module.named_modules():
        for key, value in [*vars(child).items(), *child._buffers.items()]:
            if type(value) is not torch.Tensor or not _lies_in_a_storage(value):
                continue
            if not {f"{key}_orig", f"{key}_g"} & child._parameters.keys():
                for _, other_name, parameter in in_storage.get(compat.storage_of(value), ()):
                    if parameter.requires_grad and _meet(value, parameter):
                        warnings.warn(
                            f"{path + '.' if path else ''}{key} of {type(module).__name__} lies in the memory of parameter {other_name}, "
                            f"which sharding moves: from now on it keeps the values of now. Take {other_name}.detach() where it is needed",
                            stacklevel=3,
                        )


def _lies_in_a_storage(tensor: torch.Tensor) -> bool:
    is_wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not is_wrapper and tensor.layout is torch.strided and not tensor.is_nested


def _bytes_of(tensor: torch.Tensor) -> range:
    """From the first byte of a tensor to behind the last one, in its storage."""
    first = tensor.storage_offset() * tensor.element_size()
    if not tensor.numel():
        return range(first, first)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(first, first + (last + 1) * tensor.element_size())


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have a number in common; those of columns may lie between each other."""
    some, others = _bytes_of(one), _bytes_of(other)
    if max(some.start, others.start) >= min(some.stop, others.stop):
        return False
    if one.dtype != other.dtype or some == others:
        return True
    first, size = min(some.start, others.start), one.element_size()
    marks = torch.zeros((max(some.stop, others.stop) - first) // size, dtype=torch.bool, device="cpu")
    places = [
        marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - first // size)
        for tensor in (one, other)
    ]
    places[0].fill_(True)
    return bool(places[1].any())


def refuse_other_mesh(nested: Unit, context: Context) -> None:
    """Refuse a unit that is not used for the data of all ranks of its root, or gathers over other ranks than its root's slots.

    Raises:
        ShardingError: With its name and both meshes' sizes.
    """
    for group in nested.groups:
        if context.mesh.expert is not None and group.mesh.expert is None:
            raise ShardingError(
                f"fully_shard: unit {nested.name} has the same parameters on all ranks, and the module around it was given a mesh with the "
                f'axis "{context.mesh.expert.name}", along which all parameters would differ; leave that axis to the experts'
            )
        if (tensor := _tensor_ranks(group.mesh)) != (outside := _tensor_ranks(context.mesh)):
            raise ShardingError(
                f"fully_shard: unit {nested.name} was given a mesh with ranks {tensor} along a tensor axis, and the module around it one "
                f"with {outside}; pass meshes with the same tensor axis"
            )
        if group.mesh.num_ranks != context.mesh.num_ranks:
            raise ShardingError(
                f"fully_shard: unit {nested.name} is sharded over a mesh of {group.mesh.num_ranks} ranks inside a module sharded over "
                f"{context.mesh.num_ranks}, so its gradients would leave out the data of the others. Shard both over the same ranks; if "
                'this unit holds different experts on different ranks, name the axis along which they differ "expert", and pass the '
                "mesh with it"
            )
        if context.channels.symmetric and group.mesh.device_mesh != context.mesh.device_mesh:
            raise ShardingError(
                f"fully_shard: symmetric_memory=True, but unit {nested.name} is sharded over another mesh than the module around it, and "
                "symmetric memory belongs to one set of ranks; leave symmetric_memory out"
            )


def _tensor_ranks(mesh: Mesh) -> list[int]:
    """The global ranks that compute the same data as this one."""
    return [dist.get_rank()] if mesh.tensor is None else dist.get_process_group_ranks(mesh.tensor.group)


def check_same_model(module: nn.Module, named: Sequence[Named], mesh: Mesh, device: torch.device) -> None:
    """Raise a ShardingError unless every rank shards the same parameters: collectives would mix different ones."""
    lines = []
    for name, parameter, _ in named:
        part = part_of(parameter)
        of = "" if part is None else f" of sections {part.sections} of dim {part.dim}"
        lines.append(f"{name}: {tuple(parameter.shape)}{of} {parameter.dtype} requires_grad={parameter.requires_grad}")
    if not mesh.replicated_axes or dist.get_backend(mesh.shard.group) == "fake":
        return
    described = [type(module).__name__, *lines]
    if are_alike(described, mesh.replicated_axes, device):
        return
    everyone = _from_all_ranks(described, mesh)
    other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    missing = [line for line in everyone[0] if line not in everyone[other]]
    extra = [line for line in everyone[other] if line not in everyone[0]]
    raise ShardingError(
        f"fully_shard: ranks do not have the same module: rank {other} of the mesh differs from rank 0. Expected, as on "
        f"rank 0: {missing[:4]}; got on rank {other}: {extra[:4]}. Build the same model on every rank: with "
        "one seed, the same layers frozen, and one version of each package"
    )


def _from_all_ranks(value: Any, mesh: Mesh) -> list[Any]:
    """What every rank of the mesh passed, as the same list on all of them."""
    collected: list[Any] = [value]
    for axis in mesh.replicated_axes:
        pieces: list[Any] = [None] * axis.size
        dist.all_gather_object(pieces, collected, group=axis.group)
        collected = [item for piece in pieces for item in piece]
    return collected
