"""Checks what users pass to the strategies, where it is passed, and finds the parameters that they name once there is a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine import MixedPrecisionPolicy, is_sharded
from lightning_mfsdp.engine.internals import check_sharding as check_strategies
from lightning_mfsdp.engine.internals import other_arguments, policy_of
from lightning_mfsdp.recompute import Recompute

__all__ = [
    "check_adapters",
    "check_batch_norms",
    "check_blocks_per_unit",
    "check_choice",
    "check_context_dims",
    "check_cuda_graph",
    "check_device",
    "check_expert_graph",
    "check_ignored",
    "check_policy",
    "check_recompute_graph",
    "check_samples",
    "check_sharding",
    "check_tensor_plan",
    "ignored_parameters",
    "outer_ranks",
    "warn_of_other_options",
    "warn_of_other_policies",
]


_SHARDING_OF_FSDP = {
    "FULL_SHARD": 'sharding="optim_grads_params"',
    "SHARD_GRAD_OP": 'sharding="optim_grads"',
    "HYBRID_SHARD": 'sharding="optim_grads_params" with outer=(number of groups, such as nodes)',
}


# Of options whose choices do not explain themselves: what is said beside the choices.
_EXAMPLES = {
    "offload": 'offload="optimizer" keeps main weights and optimizer state in host memory',
    "unused_parameters": 'parameters that no rank used have no gradient, and with unused_parameters="zero" one of zeros',
    "accumulation": "the Trainer says how many batches a step has, such as Trainer(accumulate_grad_batches=4)",
    "state_dict_type": 'state_dict_type="sharded" saves a directory, and state_dict_type="full" one file',
}


def check_choice(argument: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise a ValueError unless `value` is one of `choices`."""
    if value not in choices:
        example = f"; {_EXAMPLES[argument]}" if argument in _EXAMPLES else ""
        raise ValueError(f"{argument}={value!r}: expected one of {', '.join(map(repr, choices))}{example}")


def check_duration(argument: str, value: object) -> None:
    """Raise a TypeError unless `value` is a timedelta, and a ValueError if it is negative."""
    if not isinstance(value, timedelta):
        raise TypeError(f"{argument}={value!r}: expected a timedelta, such as timedelta(seconds=60)")
    if value < timedelta(0):
        raise ValueError(f"{argument}={value!r}: expected a timedelta of at least 0 seconds")


def check_samples(argument: str, value: object) -> None:
    """Raise a ValueError unless `value` is a positive number of samples, or `None`."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(
            f"{argument}={value!r}: expected a positive number of samples, such as {argument}=512, or None"
        )


def check_context_dims(dims: object) -> None:
    """Raise a TypeError unless it is a mapping of dims, or `None`."""
    if dims is not None:
        kinds = isinstance(dims, Mapping) and all(dim is None or isinstance(dim, int) for dim in dims.values())
        if not kinds:
            raise TypeError(
                f'context_dims={dims!r}: expected a mapping from entries of a batch to sequence dims, such as {{"tokens": 1}}, or to None'
            )


def check_tensor_plan(plan: object) -> None:
    """Raise a TypeError unless it is a mapping of names to names, or `None`."""
    if plan is None:
        return
    if not isinstance(plan, Mapping) or not all(isinstance(text, str) for item in plan.items() for text in item):
        raise TypeError(
            f'tensor_plan={plan!r}: expected a mapping from names of modules or parameters to names of styles, such as {{"layers.*.up": '
            '"colwise", "layers.*.down": "rowwise"}'
        )


def check_cuda_graph(cuda_graph: object, storage: str, offload: str | None, *, divides: bool) -> None:
    """Raise unless it is a bool that the other options allow: a graph replays addresses on the device."""
    if not isinstance(cuda_graph, bool):
        raise TypeError(f"cuda_graph={cuda_graph!r}: expected True or False")
    if cuda_graph and storage != "pooled":
        raise ValueError(
            f'cuda_graph=True with storage={storage!r}: graphs replay addresses, which need storage="pooled"; leave one of the two out'
        )
    if cuda_graph and divides:
        raise ValueError(
            "cuda_graph=True with a context axis: a graph would replay the padding and documents of the batch that it was recorded "
            "with; leave one out"
        )
    if cuda_graph and offload is not None:
        raise ValueError(
            f"cuda_graph=True with offload={offload!r}: a replay would read main weights from host memory in every step; leave one out"
        )


def check_sharding(sharding: object, outer_sharding: str | int) -> None:
    """Answer the names of FSDP's sharding strategies with ours; the engine checks the rest."""
    for strategy in sharding.values() if isinstance(sharding, Mapping) else (sharding,):
        name = str(getattr(strategy, "name", strategy)).upper()
        if name in _SHARDING_OF_FSDP:
            raise ValueError(f"sharding={sharding!r} is a name of FSDP's; use {_SHARDING_OF_FSDP[name]}")
    check_strategies(sharding, outer_sharding)


def check_recompute_graph(cuda_graph: bool, recompute: object) -> None:
    """Raise a ValueError if inputs would go to host memory inside a graph, which cannot allocate any."""
    if cuda_graph and isinstance(recompute, Recompute) and recompute.offload:
        raise ValueError(
            "cuda_graph=True with Recompute(offload=True): no graph can hold its copies to and from host memory; leave one out"
        )


def check_expert_graph(cuda_graph: bool, expert: int, dispatcher: str) -> None:
    """Raise a ValueError if the host would have to wait for numbers of tokens inside a graph."""
    if cuda_graph and expert > 1 and dispatcher == "all_to_all":
        raise ValueError(
            f'cuda_graph=True with expert={expert} and expert_dispatcher="all_to_all": the host waits for the numbers of tokens that ranks '
            'exchange, and a graph cannot; use expert_dispatcher="all_gather", and batches of equally many tokens on all ranks'
        )


def check_blocks_per_unit(blocks_per_unit: object) -> None:
    """Raise a ValueError unless it is "auto" or a positive number."""
    is_number = isinstance(blocks_per_unit, int) and not isinstance(blocks_per_unit, bool)
    if blocks_per_unit != "auto" and not (is_number and blocks_per_unit >= 1):  # type: ignore[operator]
        raise ValueError(f'blocks_per_unit={blocks_per_unit!r}: expected "auto" or a positive number of blocks')


def check_policy(policy: object) -> None:
    """Raise a TypeError unless it is a policy or `None`."""
    if policy is not None and not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            f"policy: expected a MixedPrecisionPolicy or None, got {policy!r}; strings go to precision, of the Trainer or Fabric, such as "
            'precision="bf16-mixed"'
        )


def check_ignored(ignored: object) -> None:
    """Raise a TypeError unless it is a collection of parameters and name patterns."""
    entries = list(ignored) if isinstance(ignored, Iterable) and not isinstance(ignored, (str, Tensor)) else [None]
    if not all(isinstance(entry, (str, nn.Parameter)) for entry in entries):
        raise TypeError(
            f'ignored_parameters={ignored!r}: expected a list of parameters and name patterns, such as ["*.norm.*"]'
        )


def check_device(device_type: str) -> None:
    """Raise a ValueError for devices that the engine does not support."""
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f'mfsdp runs on CPU and CUDA, got {device_type}; use accelerator="cpu" or "gpu"')


def check_batch_norms(module: nn.Module) -> None:
    """Raise a ValueError if `sync_batchnorm=True` comes too late: layers are replaced before they are sharded, or not at all."""
    if not any(is_sharded(part) for part in module.modules()):
        return
    for name, layer in module.named_modules():
        if isinstance(layer, compat.BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
            raise ValueError(
                f"sync_batchnorm=True, but {type(module).__name__} is sharded already, with the {type(layer).__name__} {name} in it. Call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm before it is sharded, or use one Trainer with this option from the start"
            )


def check_adapters(module: nn.Module) -> None:
    """Raise a ValueError for adapters of PEFT on the meta device: the code that sets their first values has run before they get memory.

    Where tensors have no memory (an estimate of it), they have no values either.
    """
    if compat.is_without_memory(torch.empty(0, device="cpu")):
        return
    for name, part in module.named_modules():
        for kind in getattr(part, "adapter_layer_names", ()):
            adapter = getattr(part, kind, None)
            if isinstance(adapter, nn.Module) and any(parameter.is_meta for parameter in adapter.parameters()):
                raise ValueError(
                    f"{name}.{kind}: adapters on the meta device, whose first values only get_peft_model sets (of LoRA, one factor starts "
                    "at zero). Build the model on a real device before get_peft_model, and let it be sharded afterwards"
                )


def outer_ranks(outer: object, outer_size: object) -> object:
    """The number of outer ranks, which either of two names may say.

    Raises:
        ValueError: They contradict each other.
    """
    if outer_size != 1 and outer not in (1, outer_size):
        raise ValueError(f"outer={outer!r} and outer_size={outer_size!r} are two names of one option; give one of them")
    return outer_size if outer == 1 else outer


def ignored_parameters(module: nn.Module, wanted: Sequence[str | nn.Parameter]) -> list[nn.Parameter]:
    """The parameters selected by objects and name patterns, each once.

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


def warn_of_other_options(
    module: nn.Module,
    policy: MixedPrecisionPolicy,
    sharding: str | int | Mapping[str, str | int],
    outer_sharding: str | int,
    offload: str | None,
    unused_parameters: str,
) -> None:
    """Warn if a Trainer requests something else than how a model is sharded already; it stays unchanged."""
    name, kept = type(module).__name__, policy_of(module)
    if kept != policy:
        rank_zero_warn(
            f"{name} is already sharded and keeps its policy {kept}; this run's precision means "
            f"{policy}. Use the same precision for both, or pass the policy that you sharded with as MFSDPStrategy(policy=...)"
        )
    others = other_arguments(
        module,
        sharding=sharding,
        outer_sharding=outer_sharding,
        offload=offload,
        unused_parameters=unused_parameters,
    )
    if "sharding" in others:
        rank_zero_warn(
            f"{name} is already sharded, but not with sharding={sharding!r}, outer_sharding={outer_sharding!r}; this does not change. "
            "Use one strategy for one model, or build the model again"
        )
    if "offload" in others:
        rank_zero_warn(
            f"{name} is already sharded, but not with offload={offload!r}; its main weights are not moved. Use one strategy "
            "for one model, or build the model again"
        )
    if "unused_parameters" in others:
        rank_zero_warn(
            f"{name} is already sharded, but not with unused_parameters={unused_parameters!r}; this does not change. Use one "
            "strategy for one model, or build the model again"
        )


def warn_of_other_policies(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Warn if units that the user sharded by hand have another policy than the Trainer's; they keep theirs."""
    others = [
        name or type(module).__name__ for name, part in module.named_modules() if policy_of(part) not in (None, policy)
    ]
    if others:
        rank_zero_warn(
            f"units {others[:4]} were given to fully_shard with another policy than this run's precision stands for ({policy}) and "
            "keep theirs; pass fully_shard(..., policy=...) the same one if that is not meant"
        )
