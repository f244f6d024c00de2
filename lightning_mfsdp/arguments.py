"""What users pass to MFSDPStrategy: checked where it is passed, and turned into a mesh and parameters once those exist."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_mfsdp.engine import MixedPrecisionPolicy

__all__ = [
    "build_mesh",
    "check_choice",
    "check_policy",
    "check_sizes",
    "check_state_dict_type",
    "check_world",
    "ignored_parameters",
]


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise a ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{argument}={value!r}: expected one of {', '.join(map(repr, choices))}")


def check_state_dict_type(state_dict_type: str) -> None:
    """Raise a ValueError unless it is the kind of checkpoint this version writes."""
    if state_dict_type != "sharded":
        raise ValueError(
            f'state_dict_type={state_dict_type!r}: this version writes "sharded" checkpoints only; a single "full" file comes with a later '
            "one. Until then convert: python -m lightning.pytorch.utilities.consolidate_checkpoint <directory>"
        )


def check_policy(policy: object) -> None:
    """Raise a TypeError unless it is a policy or `None`."""
    if policy is not None and not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(f"policy: expected a MixedPrecisionPolicy or None, got {policy!r}")


def check_sizes(data_parallel_size: int | str | None, outer_size: int, mesh: DeviceMesh | None) -> None:
    """Raise a ValueError where a size is no size, or `outer_size` and `mesh` contradict each other."""
    sizes = {"data_parallel_size": data_parallel_size, "outer_size": outer_size}
    for argument, size in sizes.items():
        named = argument == "data_parallel_size" and size in (None, "auto")
        if not named and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{argument}={size!r}: expected a positive number of ranks")
    if mesh is not None and outer_size != 1:
        raise ValueError(f"outer_size={outer_size} and mesh={mesh}: a mesh already has its axes; give one of the two")
    if mesh is not None and mesh.ndim not in (1, 2):
        raise ValueError(f"mesh={mesh}: expected one axis (shard) or two (outer, shard), got {mesh.ndim}")


def check_world(
    world_size: int, data_parallel_size: int | str | None, outer_size: int, mesh: DeviceMesh | None
) -> None:
    """Raise a ValueError where sizes do not fit the number of connected ranks."""
    mesh_size = mesh.size() if mesh is not None else None
    for argument, size in (("data_parallel_size", data_parallel_size), ("mesh", mesh_size)):
        if size not in (None, "auto", world_size):
            raise ValueError(
                f"{argument} covers {size} ranks but there are {world_size}; in this version every rank is a data-parallel rank"
            )
    if world_size % outer_size:
        raise ValueError(f"outer_size={outer_size} does not divide the {world_size} ranks")


def build_mesh(device_type: str, world_size: int, outer_size: int, outer_sharding: str | int) -> DeviceMesh:
    """One axis "shard", or ("outer", "shard") where an outer axis is asked for. Neighbouring ranks share the shard axis."""
    # HFSDP is asked for by name; on one node its outer axis may have size 1, which costs nothing.
    if outer_size == 1 and outer_sharding in ("no_shard", 0):
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (outer_size, world_size // outer_size), mesh_dim_names=("outer", "shard"))


def ignored_parameters(module: nn.Module, wanted: Sequence[str | nn.Parameter]) -> list[nn.Parameter]:
    """The parameters meant by objects and name patterns, each once.

    Raises:
        ValueError: A pattern that matches no parameter of `module`.
    """
    ignored = {id(entry): entry for entry in wanted if isinstance(entry, nn.Parameter)}
    named = dict(module.named_parameters(remove_duplicate=False))
    for pattern in wanted:
        if isinstance(pattern, str):
            matches = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
            if not matches:
                raise ValueError(
                    f"ignored_parameters: {pattern!r} matches no parameter; names look like {list(named)[:5]}"
                )
            ignored.update((id(parameter), parameter) for parameter in matches)
    return list(ignored.values())
