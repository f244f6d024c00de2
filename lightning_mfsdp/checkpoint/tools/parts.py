"""The parts of a checkpoint of any program: the model by name, optimizer states by parameter name, and what Lightning saves besides them.

    model                 the tensors with a common parent: under "model", "state_dict", or anything else that holds tensors
    states                what lies beside the model and has tensors of its parameters' names, such as an average
    optimizers            whatever has "param_groups"; its state by parameter name, by number, or in flat keys "state.<name>.<key>"
    numbers               `Optimizer.state_dict()` numbers parameters in the order of its groups. Names come with the groups, from the
                          caller, or from the model's order, if only one way to match shapes exists

Only small values are read; tensors stay on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_mfsdp.checkpoint.io.trust import CheckpointError
from lightning_mfsdp.checkpoint.state.index import plain_name
from lightning_mfsdp.checkpoint.state.parameter_state import PARAMETER_STATES
from lightning_mfsdp.checkpoint.tools.deepspeed_files import is_deepspeed
from lightning_mfsdp.checkpoint.tools.leaves import (
    ChunkedTensor,
    Leaves,
    NestedPath,
    StoredObject,
    flat_name,
    is_tensor,
)
from lightning_mfsdp.checkpoint.tools.opened import open_checkpoint

__all__ = ["CheckpointParts", "OptimizerPart", "Source", "find_parts", "names_of_numbers", "read_parts", "value_of"]

Source = Literal["auto", "fsdp1", "fsdp2", "megatron-fsdp", "deepspeed", "full"]

_MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict")
_WRAPPER = "module."


@dataclass(frozen=True, kw_only=True)
class OptimizerPart:
    """State of one optimizer.

    Attributes:
        where: Its name in the checkpoint.
        state: By parameter (a name, or a number as a string until `_named`), then by name of the state.
        groups: Options, and the parameters under "params".
    """

    where: str
    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]

    @property
    def numbered(self) -> bool:
        """Whether parameters go by numbers."""
        return any(isinstance(key, int) for group in self.groups for key in group["params"])

    def by_number(self, value: Callable[[Any], Any]) -> dict[str, Any]:
        """As `Optimizer.state_dict()` has it: parameters counted through all groups.

        Args:
            value: Converts a leaf.
        """
        numbers: dict[str, int] = {}
        groups = []
        for group in self.groups:
            numbers.update({name: len(numbers) + place for place, name in enumerate(group["params"])})
            groups.append({**group, "params": [numbers[name] for name in group["params"]]})
        state = {
            numbers[name]: {key: value(leaf) for key, leaf in self.state[name].items()}
            for name in numbers
            if name in self.state
        }
        return {"state": state, "param_groups": groups}


@dataclass(frozen=True, kw_only=True)
class CheckpointParts:
    """A checkpoint in parts. Tensors may be `ChunkedTensor`.

    Attributes:
        model: By name.
        optimizers: In order.
        states: Of parameters, besides optimizers', by key and name of the parameter: averages of `ShardedEMA`. Of what Lightning wrote.
        rest: What a Lightning checkpoint holds besides the two; empty if Lightning did not write it.
        tied: Further names of tied weights, and the name that each is the same as, if the checkpoint records that.
        versions: Of the model's modules, by name; `None` if the checkpoint does not record them.
        left_out: Paths of everything that is in none of these.
        notes: What had to be guessed, in words.
    """

    model: dict[str, Any]
    optimizers: list[OptimizerPart]
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    versions: dict[str, Any] | None = None
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def states_by(self, value: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
        """`states` with each leaf converted by `value`."""
        return {key: {name: value(leaf) for name, leaf in state.items()} for key, state in self.states.items()}


def read_parts(
    path: Path,
    *,
    source: Source = "auto",
    model_key: str | None = None,
    parameters: Sequence[str] | None = None,
    strip_prefix: str = "",
    add_prefix: str = "",
    trust: bool = False,
) -> CheckpointParts:
    """Take a checkpoint apart; reads small values only.

    Args:
        path: A directory of torch.distributed.checkpoint or of DeepSpeed, or a file of `torch.save`.
        source: The program that wrote it. "megatron-fsdp" and "auto" handle megatron-fsdp's "module." before every name.
        model_key: Path of the model's state dict, joined with dots, where it cannot be found.
        parameters: Names of all parameters in the order in which the optimizers hold them, for states that go by number. Names as in the
            result.
        strip_prefix: Removed from the start of every parameter name.
        add_prefix: Then prepended.
        trust: Read Python objects that `torch.load` refuses by default.

    Raises:
        CheckpointError: It cannot be read, or a part of it cannot be mapped.
    """
    _check_source(path, source)
    opened = open_checkpoint(path, trust=trust)
    parts = find_parts(path, opened.leaves, model_key, has_states=bool(opened.rest))
    wrapped = all(name.startswith(_WRAPPER) for name in parts.model)
    if source == "megatron-fsdp" or (
        source == "auto" and wrapped and any(optimizer.numbered for optimizer in parts.optimizers)
    ):
        parts = _renamed(path, parts, _WRAPPER, "")
    parts = _renamed(path, parts, strip_prefix, add_prefix)
    optimizers, notes = _named(path, parts, parameters)
    known = {plain_name(name) for name in parts.model}  # state has the names that parameters have without wrappers
    for optimizer in optimizers:
        strange = [name for name in optimizer.state if plain_name(name) not in known]
        if strange:
            raise CheckpointError(
                f"{path}: {optimizer.where} holds state of {', '.join(strange[:8])} (of {len(strange)}), which the model in the checkpoint "
                "has not; expected names of its parameters. Convert a checkpoint whose optimizer and model belong together"
            )
    same_names = not (strip_prefix or add_prefix)
    rest = dict(opened.rest)
    of_file = _renamed_states(rest.pop(PARAMETER_STATES, {}), strip_prefix, add_prefix)
    return replace(
        parts,
        optimizers=optimizers,
        states={**parts.states, **of_file},
        rest=rest,
        tied=opened.tied,
        versions=opened.versions if same_names else None,
        notes=notes,
    )


def find_parts(path: Path, leaves: Leaves, model_key: str | None = None, *, has_states: bool = True) -> CheckpointParts:
    """Find model and optimizers among leaves; names are unchanged.

    Args:
        path: Of the checkpoint, for messages.
        leaves: Of the checkpoint.
        model_key: Where the model is.
        has_states: What lies beside the model under its names is state; in a checkpoint of another program it may be anything.

    Raises:
        CheckpointError: There is no model, or it is unclear which one is meant.
    """
    parents: dict[NestedPath, Leaves] = {}
    for leaf_path in leaves:
        for place, part in enumerate(leaf_path):
            if (part == "param_groups" and place + 1 < len(leaf_path)) or str(part).startswith("param_groups."):
                parents.setdefault(leaf_path[:place], {})
                break
    others: Leaves = {}
    for leaf_path, leaf in leaves.items():
        parent = next((parent for parent in parents if _in_optimizer(leaf_path, parent)), None)
        (others if parent is None else parents[parent])[leaf_path] = leaf
    where = _model_path(path, others, model_key)
    model = {
        str(leaf_path[-1]): leaf
        for leaf_path, leaf in others.items()
        if leaf_path[:-1] == where and (where or is_tensor(leaf))
    }
    optimizers = [_optimizer(path, parent, inside) for parent, inside in sorted(parents.items(), key=_by_number)]
    shapes = {plain_name(name): leaf.shape for name, leaf in model.items() if is_tensor(leaf)}
    states: dict[str, dict[str, Any]] = {}
    left_out = []
    for leaf_path, leaf in others.items():
        if leaf_path[:-1] == where and leaf_path[-1] in model:
            continue
        is_beside = len(leaf_path) > 1 and leaf_path[:-2] == where[:-1] and leaf_path[-2] not in _MODEL_KEYS
        if has_states and where and is_beside and is_tensor(leaf) and leaf.shape == shapes.get(str(leaf_path[-1])):
            states.setdefault(str(leaf_path[-2]), {})[str(leaf_path[-1])] = leaf
        else:
            left_out.append(flat_name(leaf_path))
    return CheckpointParts(model=model, optimizers=optimizers, states=states, left_out=left_out)


def value_of(leaf: Any) -> Any:
    """A leaf as a value: objects and stored tensors are read."""
    if isinstance(leaf, StoredObject):
        return leaf.read()
    if isinstance(leaf, ChunkedTensor):
        whole = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        for _ in leaf.read_into(whole):
            pass
        return whole
    return leaf


def _check_source(path: Path, source: Source) -> None:
    if source not in get_args(Source):
        raise CheckpointError(f"source: expected one of {', '.join(get_args(Source))}, got {source!r}")
    if source != "auto" and path.exists() and path.is_file() != (source == "full"):
        got = "file" if path.is_file() else "directory"
        expected = "file" if source == "full" else "directory"
        raise CheckpointError(f"{path} is a {got}, and checkpoints of {source} are a {expected}; leave --from out")
    if source not in ("auto", "full") and path.is_dir() and is_deepspeed(path) != (source == "deepspeed"):
        program = "another program" if source == "deepspeed" else "DeepSpeed"
        raise CheckpointError(f"{path} was written by {program}, not by {source}; leave --from out")


def _in_optimizer(path: NestedPath, parent: NestedPath) -> bool:
    if len(path) <= len(parent) or path[: len(parent)] != parent:
        return False
    part = str(path[len(parent)])
    nested = len(path) > len(parent) + 1
    return (nested and part in ("state", "param_groups")) or part.startswith(("state.", "param_groups."))


def _by_number(item: tuple[NestedPath, Leaves]) -> int:
    """Position of `optimizer_10`, and of names without a number; sorting is stable."""
    digits = str(item[0][-1]).rpartition("_")[2] if item[0] else ""
    return int(digits) if digits.isdecimal() else 0


def _model_path(path: Path, leaves: Leaves, model_key: str | None) -> NestedPath:
    parents = list(dict.fromkeys(leaf_path[:-1] for leaf_path, leaf in leaves.items() if is_tensor(leaf)))
    if model_key is not None:
        chosen = [parent for parent in parents if flat_name(parent) == model_key]
    elif len(parents) == 1:
        chosen = parents
    else:
        chosen = [parent for parent in parents if parent and parent[-1] in _MODEL_KEYS]
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join(repr(flat_name(parent)) for parent in parents[:8]) or "nowhere"
    raise CheckpointError(
        f"{path}: it is unclear where the model is; tensors outside of optimizers lie under {listed} (of {len(parents)}). Choose one with "
        "--model KEY (model_key)"
    )


def _optimizer(path: Path, parent: NestedPath, leaves: Leaves) -> OptimizerPart:
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    flat: dict[str, dict[str, Any]] = {}
    for leaf_path, leaf in leaves.items():
        inner = leaf_path[len(parent) :]
        if len(inner) == 1:
            kind, _, rest = str(inner[0]).partition(".")
            name, _, key = rest.rpartition(".")
            (state if kind == "state" else flat).setdefault(name, {})[key] = leaf
        elif inner[0] == "state" and len(inner) == 3:
            state.setdefault(str(inner[1]), {})[str(inner[2])] = leaf
        elif inner[0] == "param_groups" and len(inner) == 3:
            groups.setdefault(int(inner[1]), {})[str(inner[2])] = value_of(leaf)
        else:
            raise CheckpointError(
                f"{path}: {flat_name(leaf_path)} lies too deep; expected state.<parameter>.<name> and param_groups.<number>.<option>. An "
                "optimizer with nested state cannot be converted; leave it out of the checkpoint"
            )
    if flat:
        groups = dict(enumerate(_groups_of_flat(flat)))
    return OptimizerPart(
        where=flat_name(parent) or "the optimizer", state=state, groups=[groups[number] for number in sorted(groups)]
    )


def _groups_of_flat(flat: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups from options by parameter: parameters with the same options form one."""
    groups: list[dict[str, Any]] = []
    for name, leaves in flat.items():
        options = {key: value_of(leaf) for key, leaf in leaves.items()}
        group = next((group for group in groups if {**group, "params": []} == {**options, "params": []}), None)
        if group is None:
            groups.append({**options, "params": [name]})
        else:
            group["params"].append(name)
    return groups


def _renamed(path: Path, parts: CheckpointParts, strip: str, add: str) -> CheckpointParts:
    """Replace the prefix of every name."""
    strange = [name for name in parts.model if not name.startswith(strip)]
    if strange:
        raise CheckpointError(
            f"{path}: {', '.join(strange[:8])} (of {len(strange)}) do not begin with {strip!r}; expected all names of the model to. Leave "
            "--strip-prefix or --from out"
        )

    def new(name: Any) -> Any:
        return add + str(name).removeprefix(strip)

    optimizers = []
    for optimizer in parts.optimizers:
        key = "param_names" if optimizer.numbered else "params"
        groups = [
            {**group, key: [new(name) for name in group[key]]} if key in group else group for group in optimizer.groups
        ]
        state = optimizer.state if optimizer.numbered else {new(name): part for name, part in optimizer.state.items()}
        optimizers.append(replace(optimizer, state=state, groups=groups))
    model = {new(name): leaf for name, leaf in parts.model.items()}
    return replace(parts, model=model, optimizers=optimizers, states=_renamed_states(parts.states, strip, add))


def _renamed_states(states: Mapping[str, Mapping[str, Any]], strip: str, add: str) -> dict[str, dict[str, Any]]:
    return {
        key: {add + name.removeprefix(strip): leaf for name, leaf in state.items()} for key, state in states.items()
    }


def _named(
    path: Path, parts: CheckpointParts, parameters: Sequence[str] | None
) -> tuple[list[OptimizerPart], list[str]]:
    """Optimizers by parameter name, and where the names came from."""
    numbered = [optimizer for optimizer in parts.optimizers if optimizer.numbered]
    if parameters is not None:
        wanted = sum(len(group["params"]) for optimizer in numbered for group in optimizer.groups)
        if wanted != len(parameters):
            raise CheckpointError(
                f"{path}: {len(parameters)} parameter names were given, expected {wanted}: one for each parameter of optimizers that "
                "go by number"
            )
    named, notes, given = [], [], list(parameters or ())
    for optimizer in parts.optimizers:
        if optimizer.numbered:
            count = sum(len(group["params"]) for group in optimizer.groups)
            own, given = (given[:count], given[count:]) if parameters is not None else (None, [])
            names, note = names_of_numbers(path, optimizer.where, optimizer.state, optimizer.groups, parts.model, own)
            notes.append(note)
            optimizer = _by_name(optimizer, names)
        named.append(optimizer)
    return named, notes


def _by_name(optimizer: OptimizerPart, names: dict[int, str]) -> OptimizerPart:
    groups = [
        {key: value for key, value in group.items() if key != "param_names"}
        | {"params": [names[number] for number in group["params"]]}
        for group in optimizer.groups
    ]
    state = {names[int(number)]: values for number, values in optimizer.state.items()}
    return replace(optimizer, state=state, groups=groups)


# -- parameters by number ----------------------------------------------------------------------------------------------


def names_of_numbers(
    path: Path,
    where: str,
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    model: Mapping[str, Any],
    given: Sequence[str] | None,
) -> tuple[dict[int, str], str]:
    """Names by number, and a sentence about where they come from.

    Args:
        path: For messages.
        where: Name of the optimizer, for messages.
        state: By number, as a string.
        groups: With numbers under "params".
        model: Tensors by name, in the order of the model.
        given: Names in the order of the numbers, from the caller.

    Raises:
        CheckpointError: Names cannot be determined, or do not fit shapes.
    """
    numbers = [number for group in groups for number in group["params"]]
    shapes = [_shape(state.get(str(number), {})) for number in numbers]
    if given is None and all("param_names" in group for group in groups):
        given = [name for group in groups for name in group["param_names"]]
    if given is not None:
        _check_given(path, where, given, shapes, model)
        return dict(zip(numbers, given, strict=True)), f"{where}: names given for its {len(numbers)} parameters"
    candidates = _candidates(model)
    first = _match(shapes, candidates)
    last = [len(candidates) - 1 - place for place in reversed(_match(shapes[::-1], candidates[::-1]) or [])]
    if len(groups) > 1 or first is None or first != last:
        problem = (
            f"its {len(groups)} groups come in an order of their own"
            if len(groups) > 1
            else "their shapes do not follow the order of the model"
            if first is None
            else "their shapes fit the model in more than one way"
        )
        raise CheckpointError(
            f"{path}: {where} numbers its {len(numbers)} parameters, and {problem}, so their names are unknown. Give them in the "
            "optimizer's order with --parameters FILE (parameters)"
        )
    return (
        {number: candidates[place][0] for number, place in zip(numbers, first, strict=True)},
        f"{where}: its {len(numbers)} parameters go by number; they were taken in the order of the model, which their shapes follow",
    )


def _shape(state: Mapping[str, Any]) -> torch.Size | None:
    """Shape of the parameter, as far as its state shows it: averages are shaped like it, step counts are single numbers."""
    shapes = [leaf.shape for leaf in state.values() if is_tensor(leaf)]
    return max(shapes, key=lambda shape: (len(shape), shape.numel())) if shapes else None


def _candidates(model: Mapping[str, Any]) -> list[tuple[str, torch.Size]]:
    """Tensors of the model, tied ones once if that is visible."""
    candidates: list[tuple[str, torch.Size]] = []
    seen: set[tuple[int, torch.Size]] = set()
    for name, leaf in model.items():
        if not is_tensor(leaf):
            continue
        if isinstance(leaf, Tensor) and leaf.numel():
            place = (leaf.data_ptr(), leaf.shape)
            if place in seen:
                continue
            seen.add(place)
        candidates.append((name, leaf.shape))
    return candidates


def _match(shapes: Sequence[torch.Size | None], candidates: Sequence[tuple[str, torch.Size]]) -> list[int] | None:
    """The earliest places of candidates with these shapes, in order; `None` if there are not enough."""
    places: list[int] = []
    place = 0
    for shape in shapes:
        while place < len(candidates) and shape is not None and candidates[place][1] != shape:
            place += 1
        if place == len(candidates):
            return None
        places.append(place)
        place += 1
    return places


def _check_given(
    path: Path,
    where: str,
    given: Sequence[str],
    shapes: Sequence[torch.Size | None],
    model: Mapping[str, Any],
) -> None:
    problems = []
    for name, shape in zip(given, shapes, strict=True):
        leaf = model.get(name)
        if not is_tensor(leaf):
            problems.append(f"{name} is not in the model")
        elif shape is not None and leaf.shape != shape:
            problems.append(f"{name} is {tuple(leaf.shape)} in the model and {tuple(shape)} in the optimizer")
    if problems:
        raise CheckpointError(
            f"{path}: names of the parameters of {where} do not fit: {'; '.join(problems[:8])} (of {len(problems)}). List them in the "
            "order of the optimizer's groups"
        )
