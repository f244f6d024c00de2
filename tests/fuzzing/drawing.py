"""Draws of descriptions, from a seeded generator: each is independent of the others and costs a tenth of a millisecond.

Hypothesis draws the seeds where a test wants a property of all descriptions. Drawing every choice by hypothesis took a hundred times as
long, gave a third of the cases twice and varied them in clusters; shrinking knows what a description is (shrinking.py) and needs some
twenty runs.

What plain PyTorch itself cannot do is not drawn: a backward through weights that were written since, autograd.grad through reentrant
checkpoints, results of a reentrant checkpoint that hide their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

from hypothesis import strategies as st

from tests.fuzzing.description import Block, Configuration, Description, Micro, Model, Program, Step

T = TypeVar("T")

KINDS = ("plain", "two_forwards", "two_losses", "retained", "interleaved", "two_backwards", "input_grad", "no_backward")
AUTOMATIC_KINDS = (
    "two_forwards",
    "input_grad",
)  # Lightning runs the one backward itself, and wants one on several ranks
EDITS = ("in_place", "out_of_place", "data", "drop_one", "clip_norm", "clip_value", "torch_clip_norm", "view")
KEEPS = ("hook", "map", "branch", "penalty", "sum", "function")
SIDES = ("beside", "alone", "exit")
APART = ("first", "last")
BEFORE = ("layer", "block", "parameter", "parameter")
HOOKS = (
    "parameter",
    "accumulated",
    "forward",
    "before forward",
    "backward",
    "before step",
    "before step",
    "after step",
)
WRITES = ("in_place", "copy", "load_state_dict", "unshard", "data", "view")


def _chance(draw: Random, percent: int) -> bool:
    return draw.random() * 100 < percent


def _one_of(draw: Random, values: Sequence[T], percent: int = 100) -> T | str:
    """One of the values in so many percent of draws, otherwise \"\"."""
    if percent < 100 and not _chance(draw, percent):
        return ""
    return draw.choice(values)


def descriptions() -> st.SearchStrategy[Description]:
    """For properties of all descriptions."""
    return st.integers(0, 2**32).map(lambda number: drawn(Random(number)))


def drawn(draw: Random, ranks: tuple[int, ...] = (1, 2, 3, 4)) -> Description:
    """A model, a program and a configuration that fit each other."""
    loop = draw.choice(("raw", "raw", "automatic", "manual"))
    configuration = _configuration(draw, ranks, loop)
    case = Description(_model(draw), _program(draw, loop), configuration)
    # Last, so that a seed draws the rest as it did before there was this.
    return settled(_with_hooks(draw, _with_side_doors(draw, case)))


def _with_side_doors(draw: Random, case: Description) -> Description:
    """What blocks keep, losses of it, and what a step does around the root's forward."""
    model, steps = case.model, case.program.steps
    model = replace(model, before=_one_of(draw, BEFORE, 32), judge=_one_of(draw, ("result", "feature"), 16))
    if _chance(draw, 70):
        blocks = tuple(replace(block, keeps=_one_of(draw, KEEPS, 40)) for block in model.blocks)
        model = replace(model, blocks=blocks)
    steps = tuple(replace(step, micros=tuple(_beside(draw, micro) for micro in step.micros)) for step in steps)
    return replace(case, model=model, program=replace(case.program, steps=steps))


def _with_hooks(draw: Random, case: Description) -> Description:
    """What a program has registered on its model and optimizer, and the optimizer's groups."""
    hooks = _one_of(draw, HOOKS, 50)
    model = replace(case.model, hooks=hooks, hooks_late=bool(hooks) and _chance(draw, 50))
    return replace(case, model=model, program=replace(case.program, groups=_chance(draw, 20), decays=_chance(draw, 20)))


def _beside(draw: Random, micro: Micro) -> Micro:
    kind = micro.kind
    if kind == "plain":
        kind = _one_of(draw, ("weight_grad", "rest_grad", "jvp"), 15) or kind
    return replace(micro, kind=kind, side=_one_of(draw, (*SIDES, *APART * 3) if kind == "plain" else SIDES, 52))


def _configuration(draw: Random, allowed: tuple[int, ...], loop: str) -> Configuration:
    ranks = draw.choice(allowed)
    outer = 0
    if _chance(draw, 40):
        outer = draw.choice([size for size in (2, 1, 4, 3) if not ranks % size] or [1])
    sharding = draw.choice(("optim_grads_params", "optim_grads", "optim", "no_shard"))
    hybrid = outer and sharding != "no_shard" and _chance(draw, 50)
    precision = draw.choice(("float64",) * 4 + ("float32", "float32", "mixed", "bfloat16"))
    return Configuration(
        ranks=ranks,
        outer=outer,
        sharding=sharding,
        outer_sharding="optim" if hybrid else "no_shard",
        precision=precision,
        comm="bfloat16" if precision != "float64" and _chance(draw, 25) else "",
        grouped=_chance(draw, 30),
        direct=_chance(draw, 25),
        offload=_chance(draw, 15),
        reshard=draw.choice(("yes", "yes", "yes", "no", "auto")),
        dynamic=_chance(draw, 20),
        keeps_compute=_chance(draw, 15),
        keeps_dtensors=loop == "raw" and _chance(draw, 30),
        late_root=loop == "raw" and _chance(draw, 25),
    )


def _model(draw: Random) -> Model:
    blocks = [_block(draw, index) for index in range(draw.choice((1, 2, 3, 4)))]
    return Model(
        blocks=tuple(blocks),
        scale=_chance(draw, 25),
        row=_chance(draw, 20),
        empty=_chance(draw, 15),
        unused=_chance(draw, 12),
        frozen=_chance(draw, 15),
        tied=_chance(draw, 20),
        hidden=_chance(draw, 10),
    )


def _block(draw: Random, index: int) -> Block:
    checkpoint = _one_of(draw, ("non_reentrant", "reentrant"), 25)
    earlier = tuple(range(index))
    return Block(
        kind=draw.choice(("linear", "linear", "mlp", "narrow", "norm", "nested", "cube")),
        unit=not _chance(draw, 15),
        calls=2 if _chance(draw, 15) else 1,
        checkpoint=checkpoint,
        result=_one_of(draw, ("hidden", "dict"), 20),
        frozen=_one_of(draw, ("weight", "all"), 12),
        unused=_chance(draw, 6),
        dropped=_one_of(draw, ("all", "by rank"), 10),
        same_as=draw.choice(earlier) if earlier and _chance(draw, 10) else -1,
        tied_to=draw.choice(earlier) if earlier and _chance(draw, 12) else -1,
        dtype="float32" if _chance(draw, 15) else "",
        clamps=_chance(draw, 5),
    )


def _program(draw: Random, loop: str) -> Program:
    optimizer = draw.choice(("sgd", "adamw", "adamw", "momentum", "adagrad", "lars"))
    length = draw.choice((2, 1, 3))
    if loop != "automatic":
        steps = tuple(_step(draw, loop) for _ in range(length))
        return Program(loop, steps, optimizer, calls_method=loop == "manual" and _chance(draw, 50))
    micros, sync = draw.choice((1, 2, 3)), draw.choice(("no_sync", "no_sync", "keep_sharded"))
    zero = draw.choice(("optimizer none", "optimizer none", "optimizer zero", "module none", "module zero", ""))
    steps = tuple(
        replace(
            _around(draw, loop),
            micros=tuple(
                _micro(draw, AUTOMATIC_KINDS, "all" if last == micros else sync) for last in range(1, micros + 1)
            ),
            zero=zero,
            zero_at="between",
        )
        for _ in range(length)
    )
    return Program(loop, steps, optimizer, calls_method=_chance(draw, 50))


def _step(draw: Random, loop: str) -> Step:
    micros = draw.choice((1, 1, 2, 3))
    sync = draw.choice(("no_sync", "all", "keep_sharded"))
    takes_step = not _chance(draw, 10)
    kinds = [_micro(draw, KINDS, sync) for _ in range(micros)]
    if not takes_step and _chance(draw, 60):
        kinds[-1] = replace(kinds[-1], sync="all")
    return replace(
        _around(draw, loop),
        micros=tuple(kinds),
        takes_step=takes_step,
        zero=draw.choice(("optimizer none", "optimizer zero", "module none", "module zero", "")),
        zero_at=draw.choice(("after", "after", "before", "between")),
        freezes=_one_of(draw, ("freeze", "thaw"), 20 if takes_step else 60),  # also while gradients are held back
    )


def _micro(draw: Random, kinds: tuple[str, ...], sync: str) -> Micro:
    evaluates = _one_of(draw, ("before", "between", "after"), 15)
    return Micro(
        kind="stale" if len(kinds) > 4 and _chance(draw, 3) else draw.choice((*("plain",) * 5, *kinds)),
        sync=sync,
        evaluates=evaluates,
        inference=bool(evaluates) and _chance(draw, 40),
        poisoned=sync == "no_sync" and _chance(draw, 20),
    )


def _around(draw: Random, loop: str) -> Step:
    inside = ("end", "end", "inside") if loop != "raw" else ("end",)
    write, write_at = _one_of(draw, WRITES, 40), draw.choice(inside)
    if write and _chance(draw, 40 if write_at == "inside" else 6):
        write = "assign_data"
    return Step(
        edit=_one_of(draw, EDITS, 45),
        write=write,
        write_to=draw.choice(("all", "root", "blocks")),
        write_at=write_at,
        state=_one_of(draw, ("look", "save", "restore", "optimizer", "unshard_part"), 35),
        state_at=draw.choice(inside),
    )


def settled(case: Description) -> Description:
    """The nearest case that plain PyTorch can run and that says nothing without effect."""
    case = _for_hooks(case)
    configuration, program = case.configuration, case.program
    low = configuration.precision in ("mixed", "bfloat16")
    kinds = {micro.kind for step in program.steps for micro in step.micros}
    asks = bool(kinds & {"input_grad", "weight_grad", "rest_grad", "jvp"})
    blocks: list[Block] = []
    for block in case.model.blocks:
        if block.same_as >= 0:
            while block.same_as >= 0 and blocks[block.same_as].same_as >= 0:
                block = replace(block, same_as=blocks[block.same_as].same_as)
            owner = blocks[block.same_as]
            block = replace(owner, same_as=block.same_as, calls=block.calls, dropped=block.dropped)
        if block.checkpoint == "reentrant" and (block.result or asks):
            block = replace(block, result="") if block.result and not asks else replace(block, checkpoint="")
        # What a reentrant checkpoint computes has no graph; a function of this form knows no tangents, and nothing of autocast.
        if block.checkpoint == "reentrant" or (
            block.keeps == "function" and ("jvp" in kinds or configuration.precision == "mixed")
        ):
            block = replace(block, keeps="")
        if block.dropped == "by rank":  # backwards of some ranks alone hang under DDP as well
            block = replace(block, keeps="")
        if block.tied_to >= 0:
            other = blocks[block.tied_to]
            wide = ("mlp", "narrow")
            if (
                block.same_as >= 0
                or block.kind in wide
                or other.kind in wide
                or other.tied_to >= 0
                or other.same_as >= 0
            ):
                block = replace(block, tied_to=-1)
            else:  # who clamps what another block has read changes that block's saved weight under it
                block = replace(block, dtype=other.dtype, frozen=other.frozen, clamps=False)
        if configuration.precision != "float64" or program.loop != "raw":
            block = replace(block, dtype="")
        if low or block.dropped == "by rank":  # ranks of DDP would have other weights, too
            block = replace(block, clamps=False)
        if configuration.precision == "mixed" and program.calls_method and not block.unit and block.kind == "norm":
            block = replace(
                block, kind="linear"
            )  # a step's own parameters are float32, and on CPU autocast leaves LayerNorm alone
        if (
            configuration.sharding == "optim_grads_params" and block.dropped
        ):  # else refused: tests/engine/test_gather_order.py
            block = replace(block, dropped="all")
        if block.dropped and block.checkpoint == "non_reentrant" and "jvp" in kinds:
            block = replace(block, dropped="all")  # PyTorch before 2.13 refuses it, on some ranks alone otherwise
        blocks.append(block)
    # What shares a module says the same of it.
    blocks = [
        replace(blocks[b.same_as], same_as=b.same_as, calls=b.calls, dropped=b.dropped) if b.same_as >= 0 else b
        for b in blocks
    ]
    owned = [blocks[b.tied_to] if b.tied_to >= 0 else b for b in blocks]
    blocks = [replace(b, dtype=o.dtype, frozen=o.frozen) for b, o in zip(blocks, owned, strict=True)]
    model = replace(case.model, blocks=tuple(blocks))
    # What blocks keep has a gradient on every rank then, or ranks would run a backward more than others; DDP hangs there as well.
    if model.tied or any(block.dropped == "by rank" for block in blocks):
        model = replace(model, frozen=False)
    if model.before == "parameter" and (program.loop == "raw" or configuration.precision == "mixed"):
        model = replace(
            model, before="layer"
        )  # outside of a training_step parameters are shards; in one they may be float32
    keeps = any(block.keeps for block in blocks)
    steps = tuple(_settled_step(_settled_sides(step, program.loop, keeps, low), program.loop) for step in program.steps)
    if program.loop == "automatic":  # what follows the last microbatch comes after the step
        before = {"after": "before"}
        last = [
            replace(s.micros[-1], evaluates=before.get(s.micros[-1].evaluates, s.micros[-1].evaluates)) for s in steps
        ]
        steps = tuple(replace(s, micros=(*s.micros[:-1], m)) for s, m in zip(steps, last, strict=True))
    if configuration.offload or program.optimizer == "lars":
        configuration = replace(configuration, keeps_dtensors=False)
    if program.optimizer == "lars":
        configuration = replace(configuration, offload=False)
    in_root = program.loop != "raw" or not any(block.unit for block in blocks)
    if low or in_root or model.hooks == "accumulated":  # what is held back meets hooks that are registered meanwhile
        configuration = replace(configuration, late_root=False)
    return Description(model, replace(program, steps=steps), configuration)


def _for_hooks(case: Description) -> Description:
    """Hooks that plain PyTorch runs as often as data-parallel training does."""
    model, program = case.model, case.program
    micros = [micro for step in program.steps for micro in step.micros]
    if (
        model.hooks == "before step" and program.loop == "automatic"
    ):  # Lightning's closure computes gradients after them
        model = replace(model, hooks="")
    if model.hooks == "backward" and any(micro.kind == "jvp" for micro in micros):
        model = replace(model, hooks="")
    if model.hooks == "accumulated" and program.loop == "automatic" and len(program.steps[0].micros) > 1:
        model = replace(model, hooks="")
    if model.hooks == "accumulated":  # PyTorch runs them in each inner backward, and for what ranks keep to themselves
        blocks = tuple(replace(b, checkpoint="") if b.checkpoint == "reentrant" else b for b in model.blocks)
        model = replace(model, blocks=blocks)
        steps = tuple(
            replace(step, micros=tuple(replace(micro, sync="all", poisoned=False) for micro in step.micros))
            for step in program.steps
        )
        program = replace(program, steps=steps)
    return replace(case, model=model if model.hooks else replace(model, hooks_late=False), program=program)


def _settled_sides(step: Step, loop: str, keeps: bool, low: bool) -> Step:
    micros = []
    for micro in step.micros:
        apart = micro.side in APART
        if not keeps:
            micro = replace(micro, side="")
        elif apart and loop == "automatic":  # of one backward
            micro = replace(micro, side="beside")
        elif apart and micro.kind != "plain":
            micro = replace(micro, side="alone")
        if low and micro.kind in ("weight_grad", "rest_grad"):  # plain PyTorch averages in hooks of weights
            micro = replace(micro, kind="plain")
        micros.append(micro)
    return replace(step, micros=tuple(micros))


def _settled_step(step: Step, loop: str) -> Step:
    if not step.write:
        step = replace(step, write_to="all", write_at="end")
    if not step.state:
        step = replace(step, state_at="end")
    if step.write == "unshard":
        step = replace(step, write_at="end")
    if step.state == "unshard_part":
        step = replace(step, state_at="end")
    if not step.zero:
        step = replace(step, zero_at="between" if loop == "automatic" else "after")
    if not step.takes_step:
        return replace(step, edit="")
    # An optimizer steps with reduced gradients.
    last = max((index for index, micro in enumerate(step.micros) if micro.kind != "no_backward"), default=-1)
    micros = list(step.micros)
    micros[last] = replace(micros[last], sync="all", poisoned=False)
    return replace(step, micros=tuple(micros))
