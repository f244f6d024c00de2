"""fully_shard: checks a module, finds the parameters that it owns, and makes a unit with groups of them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.initialize import materialize
from lightning_mfsdp.base.part import copy_marks
from lightning_mfsdp.engine.api.strategies import Sharding, choose_strategies
from lightning_mfsdp.engine.api.validate import (
    Named,
    check_same_model,
    refuse_ignored_parts,
    refuse_other_mesh,
    refuse_parts,
    refuse_shared_memory,
    refuse_unfit,
)
from lightning_mfsdp.engine.comm.communicators import check_symmetric_memory
from lightning_mfsdp.engine.comm.mesh import Mesh, resolve_mesh
from lightning_mfsdp.engine.core.context import Context
from lightning_mfsdp.engine.core.conversion import follow_conversions
from lightning_mfsdp.engine.core.fp32_modules import casts_alike, fp32_parameters
from lightning_mfsdp.engine.core.group import ParameterGroup, owner_of, place_of
from lightning_mfsdp.engine.core.group_spec import GroupSpec
from lightning_mfsdp.engine.core.parameter import mark_owner
from lightning_mfsdp.engine.core.policy import MixedPrecisionPolicy
from lightning_mfsdp.engine.core.sharded_parameter import ShardedParameter
from lightning_mfsdp.engine.core.unit import Unit, unit_of
from lightning_mfsdp.engine.features.buffers import share_from_first
from lightning_mfsdp.engine.features.direct_gradients import write_directly
from lightning_mfsdp.engine.features.packed_weights import as_bytes, tensors_beside
from lightning_mfsdp.engine.layout.layout import padding_advice
from lightning_mfsdp.engine.layout.placement import Placement

__all__ = ["fully_shard", "mesh_device"]

ModuleT = TypeVar("ModuleT", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: ModuleT,
    mesh: DeviceMesh | None = None,
    *,
    sharding: Sharding = "optim_grads_params",
    outer_sharding: str | int = "no_shard",
    policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | Literal["auto"] = True,
    side_doors: Literal["find", "follow", "raise"] = "find",
    ignored_parameters: Iterable[nn.Parameter] | None = None,
    storage: Literal["pooled", "dynamic"] = "pooled",
    symmetric_memory: bool = False,
    offload: Literal["optimizer"] | None = None,
    unused_parameters: Literal["none", "zero"] = "none",
) -> ModuleT:
    """Shard a module's parameters, gradients and optimizer state over the ranks of a mesh, in place.

    Call it on the units first (such as the blocks of a transformer), then on the module around them. A unit is what is
    gathered and reduced at once; it owns the parameters inside it that no nested unit owns. Every rank of the mesh must
    make the same calls in the same order. Values are those of the mesh's first rank; parameters on the meta device are
    initialized by their modules' `reset_parameters`.

    Args:
        module: Any module. Its parameter names do not change; while sharded, its parameters are DTensors of the main weights. A list of
            modules that run one after the other becomes one unit: small blocks are gathered and reduced faster together. Called in
            another order they are still correct, only gathered more often; so are they under reentrant checkpointing of each.
        mesh: 1-D (shard) or 2-D (outer, shard), or with axes named "outer" and "shard". `None`: all ranks, 1-D; a process that is alone
            and has no process group gets one. Along one more axis, named "expert", parameters differ: every rank holds other rows of
            one larger parameter, and computes with them for the data of all. Gradients, norms and checkpoints are those of the larger
            one. Modules around are sharded over the same ranks without it.
        sharding: "no_shard", "optim", "optim_grads" or "optim_grads_params", or 0 to 3: what is sharded on the shard
            axis. Or a mapping from patterns of names of modules inside `module` (`fnmatch`) to these, such as {"*.experts": "optim"}: the
            first pattern counts that matches a module or one around it, and "optim_grads_params" where none does.
        outer_sharding: On the outer axis: "no_shard" (HSDP) or "optim" (HFSDP: main weights and optimizer state sharded
            there too).
        policy: Dtypes and reduction; the default keeps the module's dtype for compute and float32 for the rest.
        reshard_after_forward: Reshard unsharded weights between forward and backward (only with sharded weights). The root
            keeps its own in any case. "auto": after two steps, weights of as many units stay as the memory left on the device
            can hold (a tenth of it stays free), last units first.
        side_doors: What to do where a backward may begin at something that a unit's forward leaves elsewhere than in its result: a feature
            that a hook keeps, a penalty in an attribute. "find": units in which a look at hooks and attributes finds that are followed, so
            weights that the forward has saved are gathered again where the backward reads them. "follow": every unit, also for what is
            kept elsewhere (about 5 us for each tensor that autograd saves). "raise": none; a backward that reads a resharded
            weight raises, as it does where nothing was found.
        ignored_parameters: Unmanaged: neither sharded nor reduced.
        storage: "pooled": full-size memory in fixed slots planned from the first training step. "dynamic": from the
            caching allocator. The root's choice holds for all its units.
        symmetric_memory: Gather into symmetric memory, moved by copy engines instead of compute cores (NCCL 2.28 or later, ranks
            of one NVLink domain). Needs pooled storage. The root's choice holds for all its units.
        offload: "optimizer": main weights and optimizer state stay in host memory and are staged on the device a few at a time while the
            optimizer steps. What gathers read, this rank's shard of the compute weights, stays on the device. For elementwise optimizers.
        unused_parameters: Whose gradient no rank computed in a step. "none": `.grad` stays `None` and optimizers skip them, as
            under DDP(find_unused_parameters=True); a rank that leaves a parameter unused waits for the device once in each backward that
            reduces, to learn of the others. "zero": their gradient is zeros, to which weight decay and momentum apply; no rank waits.
            CUDA graphs always do that. The root's choice holds for all its units.

    Returns:
        The same module.

    Raises:
        ShardingError: Something cannot be sharded; names the parameters or axes concerned.
    """
    if storage not in ("pooled", "dynamic"):
        raise ShardingError(f'fully_shard: storage: expected "pooled" or "dynamic", got {storage!r}')
    if reshard_after_forward not in (True, False, "auto"):
        raise ShardingError(
            f'fully_shard: reshard_after_forward: expected True, False or "auto", got {reshard_after_forward!r}'
        )
    if side_doors not in ("find", "follow", "raise"):
        raise ShardingError(f'fully_shard: side_doors: expected "find", "follow" or "raise", got {side_doors!r}')
    if offload not in (None, "optimizer"):
        raise ShardingError(f'fully_shard: offload: expected None or "optimizer", got {offload!r}')
    if unused_parameters not in ("none", "zero"):
        raise ShardingError(f'fully_shard: unused_parameters: expected "none" or "zero", got {unused_parameters!r}')
    resolved = resolve_mesh(mesh)
    policy = policy or MixedPrecisionPolicy()
    if outer_sharding not in ("no_shard", 0) and resolved.outer is None:
        raise ShardingError(
            f"fully_shard: outer_sharding={outer_sharding!r} needs a mesh with an outer axis, got a 1-D mesh of "
            f"{resolved.shard.size} ranks; pass a 2-D mesh, or outer=... to the strategy"
        )
    members = _members(module)
    whole = members[0] if len(members) == 1 else nn.ModuleList(members)
    strategies = choose_strategies(whole, sharding)
    strategies.placements(whole, outer_sharding, resolved)  # raises before anything is changed
    inputs_are_cast = casts_alike(members, policy)
    device = mesh_device(resolved)
    if symmetric_memory:
        check_symmetric_memory(device, resolved.shard, storage)
    ignored = {id(parameter) for parameter in ignored_parameters or ()}
    refuse_shared_memory(whole, ignored)
    codec_for = policy.codec_for
    restore_packed = as_bytes(whole, device, lambda one: id(one) in ignored or codec_for(one) is not None)
    materialize(whole, device, ignored)
    encoded = _encode(whole, policy, device, ignored)
    named, borrowed = _parameters_of(whole, ignored)
    refuse_unfit(whole, named, policy)
    refuse_parts(whole, named, resolved)
    refuse_ignored_parts(whole, ignored)
    # Before any collective that moves values: between ranks with different models these would mix them up.
    check_same_model(whole, named, resolved, device)
    _share_buffers(whole, resolved, device)
    share_from_first([tensor for _, parameter, _ in named for tensor in tensors_beside(parameter)], resolved)
    keep_fp32 = set[int]().union(*(fp32_parameters(member, policy) for member in members))
    placement_of = strategies.placements(whole, outer_sharding, resolved)
    groups = [
        ParameterGroup(
            name=f"{type(whole).__name__}[{index}]",
            named=alike,
            spec=spec,
            mesh=resolved,
            placement=placement,
            policy=policy,
            device=device,
            offloads=offload is not None,
        )
        for index, ((spec, placement), alike) in enumerate(_alike(named, policy, keep_fp32, placement_of))
    ]
    for old, new in encoded:
        if (place := place_of(new)) is not None:
            mark_owner(old, *place)  # an optimizer that was built before holds it
    _advise_on_padding(groups)
    if not inputs_are_cast:  # modules that the policy keeps in float32 cast for themselves
        policy = replace(policy, cast_forward_inputs=False)
    unit = Unit(
        members,
        groups,
        policy,
        reshard_after_forward=reshard_after_forward,
        side_doors=side_doors,
        undo=[*write_directly(members, groups), *restore_packed],
    )
    context = Context(
        unit,
        resolved,
        device,
        pooled=storage == "pooled",
        symmetric=symmetric_memory,
        zeros_unused=unused_parameters == "zero",
        ignored={id(parameter): weakref.ref(parameter) for parameter in whole.parameters() if id(parameter) in ignored},
    )
    _join(whole, unit, context)
    _borrow(unit, borrowed)
    unit.shown.hook(unit)
    for member in members:
        follow_conversions(member)
    return module


def mesh_device(mesh: Mesh) -> torch.device:
    """The device of this rank's shards: for CUDA the current one."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _members(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of the new unit."""
    members = [module] if isinstance(module, nn.Module) else list(module)
    for member in members:
        if not isinstance(member, nn.Module):
            raise ShardingError(f"fully_shard: expected a module or a list of modules, got {type(member).__name__}")
        lists = isinstance(member, (nn.ModuleList, nn.ModuleDict)) and type(member).forward is nn.Module.forward
        if lists and any(owner_of(parameter) is None for parameter in member.parameters()):
            raise ShardingError(
                f"fully_shard: {type(member).__name__} has no forward, so each of its weights would be gathered by itself and kept "
                "until the backward. Call fully_shard on each module in it, or on a list of those that run one after the other: "
                "fully_shard(list(layers))"
            )
        if unit_of(member) is not None:
            raise ShardingError(
                f"fully_shard: {type(member).__name__} is sharded already; call fully_shard once for each module"
            )
    inside = {id(part) for member in members for part in member.modules() if part is not member}
    if not members or len({id(member) for member in members}) < len(members) or any(id(m) in inside for m in members):
        raise ShardingError(
            f"fully_shard: expected modules that run one after the other, got {[type(m).__name__ for m in members]}, which is empty or "
            "names a module twice or along with one inside it"
        )
    return members


# -- which parameters --------------------------------------------------------------------------------------------------


def _parameters_of(module: nn.Module, ignored: set[int]) -> tuple[list[Named], list[Named]]:
    """Parameters that the module will own, and those it shares with a unit that owns them; each once, with all its sites."""
    owned: dict[int, Named] = {}
    shared: dict[int, Named] = {}
    for prefix, child in module.named_modules(remove_duplicate=True):
        inside_unit = child is not module and _is_inside_unit(module, prefix)
        for key, parameter in child._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            name = f"{prefix}.{key}" if prefix else key
            owner = owner_of(parameter)
            if owner is not None:
                if isinstance(parameter, ShardedParameter):
                    if inside_unit:
                        continue
                    if not _is_around(owner[0].unit(), module):  # a layer in two modules; each has a unit
                        shared.setdefault(id(owner[1].full), (name, cast("nn.Parameter", owner[1].full), []))
                        continue
                    raise ShardingError(
                        f"fully_shard: parameter {name} of {type(module).__name__} on rank {dist.get_rank()} is sharded "
                        "already, by a call on another module that has it; expected a plain parameter. Shard nested units first, "
                        "the modules around them after, and modules that share parameters in one call (a list)"
                    )
                shared.setdefault(id(parameter), (name, parameter, []))[2].append((child._parameters, key))
                continue
            owned.setdefault(id(parameter), (name, parameter, []))[2].append((child._parameters, key))
    return list(owned.values()), list(shared.values())


def _is_around(unit: Unit | None, module: nn.Module) -> bool:
    """Whether a unit's modules have one inside them; if they no longer exist, that cannot be known."""
    return unit is None or any(part is module for member in unit.modules for part in member.modules())


def _is_inside_unit(module: nn.Module, prefix: str) -> bool:
    current = module
    for part in prefix.split("."):
        current = getattr(current, part)
        if unit_of(current) is not None:
            return True
    return False


def _alike(
    named: Sequence[Named], policy: MixedPrecisionPolicy, keep_fp32: set[int], placement_of: Mapping[int, Placement]
) -> list[tuple[tuple[GroupSpec, Placement], list[Named]]]:
    """Groups of equal dtypes, equal `requires_grad`, one codec and one placement, in order of first appearance.

    Args:
        named: Parameters.
        policy: Dtypes, and codecs.
        keep_fp32: Ids of parameters that stay in float32.
        placement_of: Placements by the ids of modules' tables of parameters.
    """
    groups: dict[tuple[GroupSpec, Placement], list[Named]] = {}
    for item in named:
        parameter = item[1]
        codec = policy.codec_for(parameter)
        if codec is not None and id(parameter) in keep_fp32:
            raise ShardingError(
                f"fully_shard: parameter {item[0]} is quantized, and its module is one that policy.fp32_modules keeps in float32; take it "
                "out of fp32_modules, or build that module without quantized weights"
            )
        compute = parameter.dtype if codec is not None else policy.compute_dtype or parameter.dtype
        main = policy.main_params_dtype or parameter.dtype
        if not parameter.is_floating_point():
            compute = main = parameter.dtype
        elif id(parameter) in keep_fp32:
            compute = torch.float32
        if not parameter.requires_grad and codec is None:
            main = parameter.dtype  # a codec's dtype is not that of the value before
        spec = GroupSpec(
            compute_dtype=compute,
            main_dtype=main,
            trainable=parameter.requires_grad,
            whole=parameter.dim() == 0,
            codec=codec,
        )
        table, _ = item[2][0]
        groups.setdefault((spec, placement_of[id(table)]), []).append(item)
    return list(groups.items())


def _encode(
    module: nn.Module, policy: MixedPrecisionPolicy, device: torch.device, ignored: set[int]
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Let codecs replace ordinary parameters by quantized ones; returns the replaced ones, each with its successor."""
    names = {id(parameter): name for name, parameter in module.named_parameters() if id(parameter) in ignored}
    sites = [
        (child._parameters, key, parameter)
        for child in (module.modules() if policy.weight_codecs else ())
        for key, parameter in child._parameters.items()
        if parameter is not None
    ]
    for codec in policy.weight_codecs:
        codec.encode(module, device)
    now = ((parameter, table[key]) for table, key, parameter in sites)
    encoded = [(old, new) for old, new in now if new is not None and new is not old]
    for old, new in encoded:
        # What programs and plans have put on the old parameter belongs to the one in its place.
        copy_marks(old, new)
        for hook in (old._backward_hooks or {}).values():
            new.register_hook(hook)
        if hooks := compat.take_accumulation_hooks(old):
            compat.give_accumulation_hooks(new, hooks)
    taken = dict.fromkeys(names[id(old)] for old, _ in encoded if id(old) in ignored)
    if taken:
        raise ShardingError(
            f"fully_shard: {', '.join(taken)} of {type(module).__name__} are among ignored_parameters and were to be quantized by "
            "policy.weight_codecs: only what is sharded can be. Keep their layers in high precision, or do not ignore them"
        )
    return encoded


# -- buffers and padding -----------------------------------------------------------------------------------------------


def _share_buffers(module: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Move buffers, which are not sharded, to the parameters' device, and set them to the values of the mesh's first rank."""
    moved: dict[int, Tensor] = {}
    for prefix, child in module.named_modules():
        if prefix and _is_inside_unit(module, prefix):
            continue
        for key, buffer in child._buffers.items():
            if not isinstance(buffer, Tensor) or isinstance(buffer, DTensor):
                continue
            child._buffers[key] = moved.setdefault(id(buffer), buffer.to(device))
    share_from_first(list(moved.values()), mesh)


def _advise_on_padding(groups: Sequence[ParameterGroup]) -> None:
    """Warn on one rank, once for each kind of group, if more ranks than rows waste memory."""
    for layout in {group.layout: None for group in groups}:
        if dist.get_rank() == 0 and (advice := padding_advice(layout)):
            warnings.warn(f"fully_shard: {advice}", stacklevel=3)


# -- units of one root -------------------------------------------------------------------------------------------------


def _join(module: nn.Module, unit: Unit, context: Context) -> None:
    """Bring nested units into the new root's context, in module order, the root last."""
    names: dict[Unit, list[str]] = {}
    for name, child in module.named_modules():
        nested = unit_of(child)
        if nested is not None and nested is not unit:
            names.setdefault(nested, []).append(name)
    for nested, names_of_unit in names.items():
        nested.rename(names_of_unit)
        nested.shown.unhook()  # only the outermost unit shows its parameters in modules inside
        refuse_other_mesh(nested, context)
        context.take_over(nested)
    context.add(unit)


def _borrow(unit: Unit, shared: Sequence[Named]) -> None:
    """Tied weights across units: this unit uses groups that others own, and their parameters show under its names too."""
    for name, parameter, sites in shared:
        group_and_entry = owner_of(parameter)
        assert group_and_entry is not None, "only owned parameters are shared"
        group, entry = group_and_entry
        owner = group.unit()
        if owner is None or group.mesh.device_mesh != unit.context.mesh.device_mesh:
            raise ShardingError(
                f"fully_shard: parameter {name} is shared with {entry.name} of another unit on another mesh, so they "
                "cannot be joined; "
                "shard both on the same mesh, or put both in one unit"
            )
        entry.sites.extend(sites)
        for table, key in sites:
            table[key] = entry.at_rest
        if group not in unit.shared_groups:
            unit.share(group)
            owner.users.append(weakref.ref(unit))
