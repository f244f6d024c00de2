"""Model, program and configuration as plain data: what is drawn, sent to workers, shrunk and kept in files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Block:
    """One block of the model; its result is added to what it was given.

    Attributes:
        kind: "linear"; "mlp": two layers; "narrow": through fewer features than ranks; "norm": a LayerNorm before; "cube": a 3-D bare
            parameter; "nested": a unit inside the unit.
        unit: Given to `fully_shard` by itself; otherwise its parameters belong to the root.
        calls: How often a forward calls it.
        checkpoint: "", "reentrant" or "non_reentrant"; "kept" is reentrant in which weights have a gradient, without computing again.
        result: "": a tensor; "dict"; "hidden": an object that nobody can look into.
        frozen: "", "weight" or "all".
        unused: It has a parameter that no forward reads.
        dropped: "all": every rank leaves it out of odd microbatches; "by rank": every other rank does, in turn.
        same_as: It is the very module that block `same_as` is.
        tied_to: Its first weight is that of block `tied_to`.
        dtype: "float32" inside a float64 model; "" for that of the model.
        clamps: Its forward clamps its own weight before it is used.
        keeps: What it keeps for a loss besides its result: "hook": what a forward hook on its layer sees; "map": what its layer returned;
            "branch": what its layer makes of the result; "penalty" on its weight; "sum": one that saves no weight for its backward;
            "function": a map, by a function that keeps the weight as an attribute of its ctx.
    """

    kind: str = "linear"
    unit: bool = True
    calls: int = 1
    checkpoint: str = ""
    result: str = ""
    frozen: str = ""
    unused: bool = False
    dropped: str = ""
    same_as: int = -1
    tied_to: int = -1
    dtype: str = ""
    clamps: bool = False
    keeps: str = ""


@dataclass(frozen=True)
class Model:
    """A layer, blocks and a head; what is named here belongs to the root.

    Attributes:
        blocks: In the order of their calls.
        scale: A 0-D parameter.
        row: A parameter of one row.
        empty: A parameter without elements.
        unused: A parameter that nothing reads.
        frozen: The first layer is frozen.
        tied: The head has the weight of the first layer.
        hidden: The root returns an object that nobody can look into.
        before: What a step calls before the root: "": nothing; "layer" of the root; "block": that and the first block; "parameter": it
            calls nothing, and uses one.
        judge: A frozen network is called with what the root returned, and the loss is of its "result", or of a "feature" that a hook in it
            keeps. Without a Trainer it is a root of its own.
        hooks: "": none; of the first layer's and the first block's weight: on the gradient of a "parameter", or of one that is
            "accumulated"; of the first block: "forward", "before forward", "backward"; of the optimizer: "before step", "after step".
        hooks_late: They are registered when the model is sharded, and not before.
    """

    blocks: tuple[Block, ...] = (Block(),)
    scale: bool = False
    row: bool = False
    empty: bool = False
    unused: bool = False
    frozen: bool = False
    tied: bool = False
    hidden: bool = False
    before: str = ""
    judge: str = ""
    hooks: str = ""
    hooks_late: bool = False


@dataclass(frozen=True)
class Micro:
    """One microbatch.

    Attributes:
        kind: "plain"; "retained": backward twice through one graph; "two_losses": two losses of one forward, a backward each;
            "two_forwards": their losses added up; "interleaved": two forwards, then their backwards; "two_backwards": forward, backward,
            twice; "input_grad": autograd.grad of the input before the backward; "weight_grad": of weights that hooks saw in the forward;
            "rest_grad": of weights that are looked up after it; "jvp": torch.func.jvp before the backward; "no_backward"; "stale": the
            backward of the first of two losses comes after the optimizer's step.
        sync: "all", "no_sync" or "keep_sharded".
        evaluates: "", "before", "between" (forward and backward) or "after": a forward without gradients.
        inference: That forward runs under inference_mode.
        poisoned: Its loss is NaN.
        side: What the loss has of what blocks keep: "": nothing; "beside" the loss of the result; "alone"; "exit": alone, and the forward
            ends at the last block that keeps something; "first": a backward of its own before that of the result, or "last" after it.
    """

    kind: str = "plain"
    sync: str = "all"
    evaluates: str = ""
    inference: bool = False
    poisoned: bool = False
    side: str = ""


@dataclass(frozen=True)
class Step:
    """Microbatches, and what happens around the optimizer's step.

    Attributes:
        micros: In order.
        takes_step: Otherwise gradients go on adding up.
        zero: "optimizer none", "optimizer zero", "module none", "module zero", or "": not cleared.
        zero_at: "after" the step, "before" the first forward, or "between" that and its backward.
        edit: Of gradients before the step: "", "in_place", "out_of_place", "data", "view", "drop_one", "clip_norm", "clip_value" or
            "torch_clip_norm".
        write: Of weights: "", "in_place", "copy", "data", "view", "assign_data", "load_state_dict", "unshard".
        write_to: "root", "blocks" or "all".
        write_at: "end": after the step; "inside": at the begin of training_step.
        state: "", "look": state_dict() is compared; "save", "restore": of the model; "optimizer": a round trip of its state;
            "unshard_part": the head is looked at as a whole.
        state_at: As `write_at`.
        freezes: "", "freeze" or "thaw": the first block, at the end.
    """

    micros: tuple[Micro, ...] = (Micro(),)
    takes_step: bool = True
    zero: str = "optimizer none"
    zero_at: str = "after"
    edit: str = ""
    write: str = ""
    write_to: str = "all"
    write_at: str = "end"
    state: str = ""
    state_at: str = "end"
    freezes: str = ""


@dataclass(frozen=True)
class Program:
    """What trains the model.

    Attributes:
        loop: "raw", "automatic" or "manual": without a Trainer, or under one.
        steps: In order.
        optimizer: "sgd", "momentum", "adamw" (with a large eps and weight decay), "adagrad" or "lars" (norms of whole tensors).
        calls_method: training_step calls a method of the root and not the root.
        data: Which batches.
        groups: The optimizer has every other parameter in a second group, with another learning rate.
        decays: Learning rates are lower after each step.
    """

    loop: str = "raw"
    steps: tuple[Step, ...] = (Step(),)
    optimizer: str = "sgd"
    calls_method: bool = False
    data: int = 0
    groups: bool = False
    decays: bool = False


@dataclass(frozen=True)
class Configuration:
    """How the engine runs it.

    Attributes:
        device: "cpu", with gloo, or "cuda", with NCCL.
        ranks: 1 to 4.
        outer: Ranks on the outer axis of the mesh; 0: a mesh of one axis.
        sharding: Of the shard axis.
        outer_sharding: "no_shard" (HSDP) or "optim" (HFSDP).
        precision: "float64", "float32", "mixed" (bfloat16 with float32 main weights) or "bfloat16".
        comm: "" or "bfloat16": gradients on the wire.
        grouped: Neighboring units become one, two by two.
        direct: Linear layers write weight gradients themselves.
        offload: Of main weights and optimizer state.
        reshard: `reshard_after_forward`: "yes", "no" or "auto".
        dynamic: `storage="dynamic"`.
        keeps_compute: `keep_compute_shard`.
        keeps_dtensors: The optimizer is told that it is not elementwise.
        late_root: The root is sharded after its first unit went backward under no_sync.
    """

    device: str = "cpu"
    ranks: int = 2
    outer: int = 0
    sharding: str = "optim_grads_params"
    outer_sharding: str = "no_shard"
    precision: str = "float64"
    comm: str = ""
    grouped: bool = False
    direct: bool = False
    offload: bool = False
    reshard: str = "yes"
    dynamic: bool = False
    keeps_compute: bool = False
    keeps_dtensors: bool = False
    late_root: bool = False


@dataclass(frozen=True)
class Description:
    """One case."""

    model: Model = Model()
    program: Program = Program()
    configuration: Configuration = Configuration()


_PARTS = {"model": Model, "program": Program, "configuration": Configuration}
_LISTS = {"blocks": Block, "steps": Step, "micros": Micro}


def to_json(description: Description) -> str:
    """Only what differs from the defaults, so that small cases read as such."""
    return json.dumps(_sparse(description))


def from_json(text: str) -> Description:
    """The inverse of `to_json`."""
    return _full(Description, json.loads(text))


def _sparse(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_sparse(item) for item in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    default = type(value)()
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: _sparse(item) for name, item in found.items() if item != getattr(default, name)}


def _full(kind: type, values: dict[str, Any]) -> Any:
    made = {}
    for name, value in values.items():
        if name in _PARTS:
            value = _full(_PARTS[name], value)
        elif name in _LISTS:
            value = tuple(_full(_LISTS[name], item) for item in value)
        made[name] = value
    return kind(**made)


def features(case: Description) -> set[str]:
    """What a case uses, as `kind: value`; plain defaults are not listed."""
    model, program, configuration = case.model, case.program, case.configuration
    found = {f"ranks: {configuration.ranks}", f"loop: {program.loop}", f"sharding: {configuration.sharding}"}
    found |= {f"optimizer: {program.optimizer}", f"precision: {configuration.precision}"}
    if configuration.outer:
        found.add("mesh: " + ("HFSDP" if configuration.outer_sharding == "optim" else "HSDP"))
    if configuration.reshard != "yes":
        found.add(f"reshard: {configuration.reshard}")
    for name in ("grouped", "direct", "offload", "dynamic", "keeps_compute", "keeps_dtensors", "late_root", "comm"):
        if getattr(configuration, name):
            found.add(f"option: {name}")
    for name in ("scale", "row", "empty", "unused", "frozen", "tied", "hidden"):
        if getattr(model, name):
            found.add(f"root: {name}")
    for name in ("before", "judge"):
        if getattr(model, name):
            found.add(f"{name}: {getattr(model, name)}")
    if model.hooks:
        found |= {f"hooks: {model.hooks}", f"hooks on: {'sharded' if model.hooks_late else 'plain'}"}
    for block in model.blocks:
        found |= _block_features(block)
    steps = program.steps
    micros = [micro for step in steps for micro in step.micros]
    if any(len(step.micros) > 1 for step in steps):
        found.add("loop does: accumulation")
    if program.loop != "raw" and program.calls_method:
        found.add("loop does: method")
    found |= {f"optimizer: {name}" for name in ("groups", "decays") if getattr(program, name)}
    for micro in micros:
        found.add(f"micro: {micro.kind}")
        if micro.side:
            found.add(f"side: {micro.side}")
        if micro.sync != "all":
            found.add(f"sync: {micro.sync}")
        if micro.evaluates:
            found.add(f"eval: {micro.evaluates}")
            if micro.inference:
                found.add("eval: inference mode")
        if micro.poisoned:
            found.add("micro: poisoned")
    for step in steps:
        found.add(f"zero: {step.zero or 'not'}")
        if step.zero:
            found.add(f"zero at: {step.zero_at}")
        for name in ("edit", "write", "state", "freezes"):
            if getattr(step, name):
                found.add(f"{name}: {getattr(step, name)}")
                if getattr(step, f"{name}_at", "end") == "inside":
                    found.add(f"{name} at: inside")
        if not step.takes_step:
            found.add("loop does: no step")
    return found


def _block_features(block: Block) -> set[str]:
    found = {f"block: {block.kind}"} if block.kind != "linear" else set()
    found |= {f"block: {name}" for name in ("unused", "clamps") if getattr(block, name)}
    found |= {f"block: {name} {value}" for name in ("frozen", "dropped") if (value := getattr(block, name))}
    if not block.unit:
        found.add("block: no unit")
    if block.calls > 1:
        found.add("block: called twice")
    if block.checkpoint:
        found.add(f"checkpoint: {block.checkpoint}")
    if block.result:
        found.add(f"result: {block.result}")
    if block.same_as >= 0:
        found.add("block: shared module")
    if block.tied_to >= 0:
        found.add("block: tied")
    if block.dtype:
        found.add("block: other dtype")
    if block.keeps:
        found.add(f"keeps: {block.keeps}")
    return found


def size(case: Description) -> int:
    """How much there is to read."""
    return len(to_json(case)) + 20 * case.configuration.ranks


def as_values(case: Description) -> dict[str, Any]:
    """Nested dictionaries and lists, everything spelled out."""
    return asdict(case)
