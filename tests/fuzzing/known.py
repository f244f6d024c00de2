"""Defects that are not mended yet, by the number under which they are known. Whoever mends one removes it here.

`KNOWN` leaves out of the draws what would meet a defect again and again; `DEFECTS` has the smallest case that shows
each, and tests/test_fuzz.py expects every one of them to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.fuzzing.description import Block, Configuration, Description, Micro, Model, Program, Step


class Defect(NamedTuple):
    """A case that fails as long as an item is not mended."""

    item: str
    name: str
    case: Description


def _micros(case: Description) -> list[Micro]:
    return [micro for step in case.program.steps for micro in step.micros]


def _has(case: Description, **wanted: object) -> bool:
    """Whether one block has all these values."""
    return any(all(getattr(block, name) == value for name, value in wanted.items()) for block in case.model.blocks)


def _shards_weights(case: Description) -> bool:
    configuration = case.configuration
    size = configuration.ranks // (configuration.outer or 1)
    return configuration.sharding == "optim_grads_params" and size > 1


def _writes_inside(case: Description) -> bool:
    return _has(case, clamps=True) or any(step.write and step.write_at == "inside" for step in case.program.steps)


def _handles_gradients_inside(case: Description) -> bool:
    steps = case.program.steps
    return case.program.loop == "manual" and any(step.edit or step.zero.startswith("module") for step in steps)


def _clears_what_is_held_back(case: Description) -> bool:
    held = False
    for step in case.program.steps:
        clears = bool(step.zero)
        if clears and step.zero_at in ("before", "between") and held:
            return True
        for micro in step.micros:
            if micro.kind != "no_backward":
                held = micro.sync != "all"
        if clears and step.zero_at == "after" and held:
            return True
    return False


def _has_no_backward(case: Description) -> bool:
    return _clears_what_is_held_back(case) or any(micro.kind == "no_backward" for micro in _micros(case))


def _rounds_main_gradients(case: Description) -> bool:
    return case.configuration.precision == "bfloat16" or _has(case, dtype="float32")


def _goes_back_twice(case: Description) -> bool:
    """Through one graph."""
    return any(micro.kind in ("retained", "two_losses") for micro in _micros(case))


def _calls_again_and_goes_back_again(case: Description) -> bool:
    again = case.model.tied or any(b.calls > 1 or b.same_as >= 0 or b.tied_to >= 0 for b in case.model.blocks)
    kinds = ("retained", "two_losses", "interleaved", "input_grad")
    return again and any(micro.kind in kinds for micro in _micros(case))


def _writes_directly_and_goes_back_twice(case: Description) -> bool:
    """Also where a block that hides its result is computed again in its one backward."""
    hides = _has(case, checkpoint="non_reentrant", result="hidden") or case.model.hidden
    risky = case.configuration.direct and _has(case, checkpoint="non_reentrant")
    return risky and (_goes_back_twice(case) or hides)


def _is_reduced_twice(case: Description) -> bool:
    """Each reentrant recomputation ends a backward of its unit, also where modules of one unit or several calls are still to come."""
    several = any(micro.kind in ("two_forwards", "interleaved") for micro in _micros(case))
    blocks = [block for block in case.model.blocks if block.checkpoint == "reentrant"]
    again = any(block.calls > 1 or block.same_as >= 0 or block.tied_to >= 0 for block in blocks)
    return bool(blocks) and (case.configuration.grouped or several or again)


def _hides_and_repeats(case: Description) -> bool:
    """Also called twice: two backwards of one call, and several forwards before a backward."""
    hiding = [block for block in case.model.blocks if block.result == "hidden"]
    kinds = {micro.kind for micro in _micros(case)} - {"plain", "two_backwards"}
    twice = any(block.calls > 1 or block.same_as >= 0 for block in hiding)
    return twice or (bool(hiding or case.model.hidden) and bool(kinds))


def _steps_dtensors_with_gaps(case: Description) -> bool:
    gaps = any(step.freezes or step.zero.endswith("zero") for step in case.program.steps)
    return case.program.optimizer == "lars" and gaps


def _asks_for_inputs(case: Description) -> bool:
    return any(micro.kind == "input_grad" for micro in _micros(case))


def _asks_some_ranks_alone(case: Description) -> bool:
    """autograd.grad of what some ranks have not run leaves gradients of weights on these, and zero_grad looks at them."""
    asks = any(micro.side not in ("", "beside") and micro.kind == "input_grad" for micro in _micros(case))
    return asks and _has(case, dropped="by rank")


def _reads_kept_whole_weights_after_a_step(case: Description) -> bool:
    """Whole weights of which ranks own rows: until the next forward gathers them, each rank has its own rows of after the step alone.

    Gathered at the end of the step they would be right for who kept them, if the compute stream waited for all of them then; today the
    gathers overlap with the first units of the forward. docs/strategies.md says what to read instead.
    """
    configuration = case.configuration
    is_whole = configuration.sharding in ("optim", "optim_grads") and configuration.ranks > (configuration.outer or 1)
    alone = any(micro.kind == "stale" and micro.side not in ("", "beside") for micro in _micros(case))
    return is_whole and alone and _has(case, keeps="function")


KNOWN: dict[str, Callable[[Description], bool]] = {
    "unnoticed by rank": _asks_some_ranks_alone,
    "whole and kept": _reads_kept_whole_weights_after_a_step,
}


# What is right and costs needless communication; as long as these are known, reductions are not counted.
REDUCED_TOO_OFTEN: tuple[str, ...] = ()


def _case(*blocks: Block, steps: tuple[Step, ...] = (Step(),), **options: object) -> Description:
    """A case of which only what is said here is not plain."""

    def part(kind: type, **given: object) -> object:
        names = kind.__dataclass_fields__.keys()  # type: ignore[attr-defined]
        return kind(**given, **{name: value for name, value in options.items() if name in names})

    return Description(
        part(Model, blocks=blocks or (Block(),)),  # type: ignore[arg-type]
        part(Program, steps=steps),  # type: ignore[arg-type]
        part(Configuration),  # type: ignore[arg-type]
    )


def _inside(write: str, write_to: str = "root", **options: object) -> Description:
    steps = (Step(zero_at="between", write=write, write_to=write_to, write_at="inside"),)
    return _case(steps=steps, loop="automatic", **options)


def _manual(ranks: int = 2, **step: object) -> Description:
    return _case(steps=(Step(**step), Step(**step)), loop="manual", ranks=ranks)  # type: ignore[arg-type]


_HELD = Micro(sync="no_sync")
_REENTRANT = Block(checkpoint="reentrant")

DEFECTS: tuple[Defect, ...] = (
    Defect("1", "in place, root, sharded", _inside("in_place")),
    Defect(
        "1", "copy, root, manual", _case(steps=(Step(write="copy", write_to="root", write_at="inside"),), loop="manual")
    ),
    Defect("1", "load_state_dict, root, sharded", _inside("load_state_dict")),
    Defect("1", ".data.mul_, root, sharded", _inside("data")),
    Defect("1", ".data =, root, one process", _inside("assign_data", ranks=1)),
    Defect("1", ".data =, root, no_shard", _inside("assign_data", sharding="no_shard")),
    Defect("1", "in place, root, mixed precision, one process", _inside("in_place", ranks=1, precision="mixed")),
    Defect(
        "1", "in place, root, mixed precision, no_shard", _inside("in_place", sharding="no_shard", precision="mixed")
    ),
    Defect("1", "clamp in a unit's forward", _case(Block(clamps=True))),
    Defect("1", "clamp in the forward of a block of the root", _case(Block(clamps=True, unit=False))),
    Defect("2", "zero_grad of the module", _manual(zero="module none")),
    Defect("2", "zero_grad of the module to zero", _manual(zero="module zero")),
    Defect("2", "in place, one process", _manual(ranks=1, edit="in_place")),
    Defect("2", "in place", _manual(edit="in_place")),
    Defect("2", "assignment", _manual(edit="out_of_place")),
    Defect("2", ".data", _manual(edit="data")),
    Defect("2", "p.grad = None", _manual(edit="drop_one")),
    Defect("2", "torch's clip_grad_norm_", _manual(edit="torch_clip_norm")),
    Defect("2", "torch's clip_grad_value_", _manual(edit="clip_value")),
    Defect("2", "clip_grad_norm_", _manual(edit="clip_norm")),
    Defect("4", "of the root", _case(unused=True, optimizer="adamw")),
    Defect("4", "of a unit", _case(Block(unused=True), optimizer="adamw")),
    Defect("4", "a block left out", _case(Block(dropped="all"), steps=(Step(), Step()), optimizer="momentum")),
    Defect(
        "5",
        "no backward, zero_grad of the module",
        _case(
            steps=(Step((Micro(), Micro("no_backward")), zero="module none"), Step()),
        ),
    ),
    Defect("5", "zero_grad under no_sync", _case(steps=(Step((_HELD,), takes_step=False), Step()))),
    Defect(
        "5",
        "NaN in a microbatch",
        _case(
            steps=(Step((Micro(sync="no_sync", poisoned=True),), takes_step=False), Step()),
        ),
    ),
    Defect("8", "", _case(_REENTRANT, _REENTRANT, grouped=True, precision="bfloat16")),
    Defect(
        "8",
        "a unit called twice, after autograd.grad",
        _case(
            Block(calls=2),
            steps=(Step((Micro("input_grad"),)),),
            precision="bfloat16",
            direct=True,
        ),
    ),
    Defect(
        "11c",
        "a root that hides its result, two backwards",
        _case(
            Block(unit=False, checkpoint="non_reentrant"),
            steps=(Step((Micro("retained"),)),),
            hidden=True,
            ranks=1,
        ),
    ),
    Defect(
        "unnamed 1",
        "called twice, two forwards before their backwards",
        _case(
            Block(calls=2),
            steps=(Step((Micro("interleaved"),)),),
        ),
    ),
    Defect(
        "8",
        "a tied weight, after autograd.grad, one process",
        _case(
            Block(unit=False),
            Block(tied_to=0),
            ranks=1,
            precision="bfloat16",
            loop="automatic",
            steps=(Step((_HELD, Micro("input_grad")), zero_at="between"),),
        ),
    ),
    Defect(
        "9",
        "one process",
        _case(
            Block(checkpoint="non_reentrant", calls=2),
            steps=(Step((Micro("retained"),)),),
            direct=True,
            ranks=1,
        ),
    ),
    Defect(
        "9",
        "nothing before it is trained",
        _case(
            Block(checkpoint="non_reentrant", calls=2),
            steps=(Step((Micro("two_losses"),)),),
            direct=True,
            ranks=1,
            frozen=True,
        ),
    ),
    Defect(
        "10",
        "grouped blocks, reentrant checkpoints",
        _case(
            Block(dropped="by rank", checkpoint="reentrant"),
            _REENTRANT,
            grouped=True,
            sharding="optim_grads",
        ),
    ),
    Defect(
        "10",
        "a second backward",
        _case(
            Block(),
            Block(same_as=0, dropped="by rank"),
            steps=(Step((Micro("retained"),)),),
            sharding="optim_grads",
        ),
    ),
    Defect("11a", "", _case(late_root=True)),
    Defect(
        "11b",
        "frozen in mid-run",
        _case(
            steps=(Step(zero="optimizer zero", freezes="freeze"), Step()),
            optimizer="lars",
            ranks=3,
        ),
    ),
    Defect("11c", "called twice", _case(Block(result="hidden", calls=2))),
    Defect("11c", "two backwards of one forward", _case(Block(result="hidden"), steps=(Step((Micro("two_losses"),)),))),
    Defect("11d", "", _case(_REENTRANT, _REENTRANT, grouped=True)),
    Defect("11d", "two forwards of one unit", _case(_REENTRANT, steps=(Step((Micro("two_forwards"),)),))),
    Defect("11e", "", _case(steps=(Step((Micro("stale"),)),))),
    Defect("11f", "", _case(steps=(Step(state="look", state_at="inside"),), loop="manual")),
    Defect(
        "unnamed 1",
        "a unit is reduced once for each of its calls",
        _case(
            Block(),
            Block(same_as=0),
            steps=(Step((Micro("retained"),)),),
        ),
    ),
    Defect(
        "unnamed 2",
        "the norm of a 0-D parameter's gradient in float64",
        _case(
            steps=(Step(edit="clip_norm"),),
            scale=True,
            sharding="optim",
        ),
    ),
    Defect(
        "unnamed 3",
        "the norm beside an empty gradient, to the bit",
        _case(
            Block(),
            Block(tied_to=0),
            steps=(Step((Micro(), Micro("interleaved")), edit="clip_norm"),),
            empty=True,
            ranks=1,
        ),
    ),
    Defect(
        "9",
        "a hidden result, one backward",
        _case(
            Block("narrow", checkpoint="non_reentrant", result="hidden"),
            ranks=1,
            direct=True,
        ),
    ),
    Defect(
        "4",
        "a reentrant checkpoint without a trained input",
        _case(
            Block(checkpoint="reentrant"),
            frozen=True,
            optimizer="adagrad",
        ),
    ),
    Defect(
        "4",
        "clipped by a norm that is NaN",
        _case(
            steps=(Step((Micro(poisoned=True), Micro()), edit="clip_norm"),),
            unused=True,
        ),
    ),
    Defect("12", "", _case(steps=(Step(state="unshard_part"),))),
    Defect(
        "unnamed 4",
        "a unit that is sharded into a root later",
        _case(
            Block("cube", unit=False),
            Block("nested"),
            steps=(Step(zero="optimizer zero", zero_at="between", edit="in_place"),),
            late_root=True,
            optimizer="lars",
        ),
    ),
    Defect(
        "unnamed 5",
        "clearing what is held back",
        _case(steps=(Step(zero="module none", zero_at="before"),), late_root=True),
    ),
    Defect(
        "unnamed 6",
        "a root that hides its result, two backwards, sharded weights",
        _case(steps=(Step((Micro("retained"),)),), hidden=True),
    ),
    Defect(
        "unnamed 6",
        "a root that hides its result, after autograd.grad",
        _case(steps=(Step((Micro("input_grad"),)),), hidden=True, direct=True),
    ),
    Defect(
        "unnamed 7",
        "a weight of a unit in a block of the root, in a step that calls a method",
        _case(
            Block(unit=False), Block(tied_to=0), steps=(Step(zero_at="between"),), loop="automatic", calls_method=True
        ),
    ),
    Defect(
        "unnamed 8",
        "frozen while a gradient is held back",
        _case(steps=(Step((_HELD,), takes_step=False, freezes="freeze", zero_at="before"), Step())),
    ),
    Defect(
        "unnamed 9",
        "a weight shared by a unit that is called twice, in fixed slots",
        _case(Block(), Block(calls=2, tied_to=0), Block(), steps=(Step(), Step())),
    ),
    Defect(
        "unnamed 10",
        "gradients shown of a unit that stays gathered and shares a weight with the root",
        _case(
            Block(unit=False),
            Block(tied_to=0),
            steps=(Step((Micro("no_backward"),), edit="torch_clip_norm"),),
            ranks=1,
            reshard="no",
            late_root=True,
        ),
    ),
    Defect(
        "unnamed 11",
        "two graphs with a recomputed block, in slots that one graph planned",
        _case(Block(), Block(), Block(checkpoint="non_reentrant"), steps=(Step(), Step((Micro("interleaved"),)))),
    ),
    Defect(
        "unnamed 12",
        "a root that hides its results and a block computed again in a backward of its own",
        _case(_REENTRANT, steps=(Step((Micro("two_forwards"),)),), hidden=True),
    ),
    Defect(
        "unnamed 13",
        "gradients of a unit that nobody used, after a forward without a backward",
        _case(
            Block(dropped="all"),
            steps=(Step((Micro(), Micro(), Micro("no_backward"))),),
            loop="manual",
            calls_method=True,
        ),
    ),
    Defect(
        "unnamed 14",
        "gradients cleared after a run of several modules that may go on",
        _case(
            Block(),
            Block(),
            Block(same_as=0),
            steps=(Step(zero_at="between"), Step(zero="module none", zero_at="between")),
            loop="manual",
            calls_method=True,
            ranks=1,
            grouped=True,
        ),
    ),
    Defect(
        "unnamed 15",
        "ranks that use different blocks and ask for gradients of inputs",
        _case(
            Block(dropped="by rank"),
            steps=(Step((Micro("input_grad"),)),),
            loop="manual",
            optimizer="lars",
            calls_method=True,
            sharding="optim",
        ),
    ),
    Defect(
        "unnamed 17",
        "layers that write gradients keep weights that only gradients of inputs need",
        _case(Block(frozen="all"), frozen=True, steps=(Step((Micro("stale"),)),), ranks=1, direct=True),
    ),
    Defect(
        "unnamed 18",
        "two graphs with a recomputed block, in slots that another step planned",
        _case(
            Block(), Block(), Block(checkpoint="non_reentrant"), Block(), steps=(Step((Micro(), Micro("interleaved"))),)
        ),
    ),
    Defect(
        "unnamed 19",
        "a weight tied to the root in the third backward of a step",
        _case(
            Block(unit=False),
            Block(tied_to=0),
            steps=(Step((Micro(), Micro(), Micro())),),
            loop="manual",
            calls_method=True,
        ),
    ),
    Defect(
        "unnamed 20",
        "weights written where one rank alone waits for a backward, and all of them are whole",
        _case(
            Block(result="hidden", dropped="by rank"),
            steps=(
                Step((Micro("interleaved", evaluates="between", inference=True),), write="in_place", freezes="thaw"),
            ),
            empty=True,
            hidden=True,
            optimizer="adagrad",
            sharding="optim",
            dynamic=True,
            keeps_compute=True,
        ),
    ),
    Defect(
        "unnamed 21",
        "a forward without backward that one rank alone leaves out, and all weights are whole",
        _case(
            Block(result="hidden", dropped="by rank"),
            steps=(Step((Micro("no_backward", evaluates="after"),)), Step((Micro(),))),
            sharding="optim_grads",
            comm="bfloat16",
        ),
    ),
    Defect(
        "unnamed 16",
        "a hidden result and gradients of inputs, in slots that another step planned",
        _case(
            Block(), Block(), Block(result="hidden"), steps=(Step((Micro(), Micro("input_grad"))),), loop="automatic"
        ),
    ),
    Defect(
        "jvp",
        "an AttributeError where a unit hides its result",
        _case(Block(result="hidden"), steps=(Step((Micro("jvp"),)),), ranks=1),
    ),
    Defect(
        "jvp sharded",
        "a segmentation fault after a step",
        _case(Block(keeps="map"), steps=(Step(), Step((Micro("jvp"),)))),
    ),
    Defect(
        "unnoticed",
        "zero_grad of an optimizer of one's own, one process",
        _case(
            Block(keeps="sum"),
            steps=(Step((Micro(side="alone"),), takes_step=False), Step()),
            optimizer="lars",
            ranks=1,
        ),
    ),
    Defect(
        "unnoticed",
        "a weight that is frozen before the next backward",
        _case(
            Block(keeps="sum"),
            steps=(Step((Micro(side="alone"),), takes_step=False, zero_at="before", freezes="freeze"), Step()),
            ranks=1,
        ),
    ),
    Defect(
        "unnoticed",
        "an older graph without a unit's result, on one rank",
        _case(
            Block(unit=False, keeps="branch"),
            Block(),
            Block(unit=False, same_as=0, dropped="by rank", keeps="branch"),
            steps=(Step((Micro("stale", side="alone"),), takes_step=False),),
            sharding="optim",
        ),
    ),
    Defect(
        "unnoticed by rank",
        "ranks wait for each other for ever: what one of them finds out in zero_grad, after autograd.grad of inputs",
        _case(
            Block(dropped="by rank"),
            Block(keeps="map"),
            steps=(
                Step(zero=""),
                Step((Micro("input_grad", evaluates="between", side="alone"),), zero="module zero", zero_at="between"),
            ),
            sharding="optim",
        ),
    ),
    Defect(
        "replaced",
        "a gradient that was reduced over shards first, with replicas, in bfloat16",
        _case(
            steps=(
                Step((Micro(sync="keep_sharded"), Micro()), zero="module zero", edit="out_of_place"),
                Step((Micro(), Micro()), zero="module zero"),
            ),
            loop="automatic",
            ranks=4,
            outer=2,
            precision="bfloat16",
        ),
    ),
    Defect(
        "hidden again",
        "a root that hides its result, after a block of it",
        _case(steps=(Step((Micro("input_grad"),)),), hidden=True, before="block"),
    ),
    Defect(
        "hidden again",
        "a root that hides its result, after a layer of it",
        _case(steps=(Step((Micro("input_grad"),)),), hidden=True, before="layer"),
    ),
    Defect(
        "words",
        "a unit that was gathered ahead elsewhere",
        _case(Block(), Block(keeps="penalty"), Block(same_as=0), steps=(Step(), Step((Micro(side="alone"),)))),
    ),
    Defect(
        "words",
        "an older graph of a weight that a step wrote, beside an unused one",
        _case(steps=(Step((Micro("stale"),)),), unused=True, loop="manual", ranks=1, precision="mixed"),
    ),
    Defect(
        "words",
        "after an evaluation between microbatches",
        _case(
            Block("nested", unit=False, keeps="hook"),
            Block(),
            steps=(Step((Micro(), Micro(evaluates="between"), Micro())), Step((Micro(side="alone"), Micro(), Micro()))),
            loop="automatic",
            calls_method=True,
        ),
    ),
    Defect(
        "rows",
        "an older graph of a frozen weight that a hook wrote after the step, in rows",
        _case(
            Block(keeps="sum"),
            frozen=True,
            before="block",
            hooks="after step",
            steps=(Step(freezes="freeze"), Step((Micro("stale", side="exit"),))),
            optimizer="lars",
            ranks=1,
        ),
    ),
    Defect(
        "whole and kept",
        "a whole weight that a function keeps, read after a step and before the next forward",
        _case(
            Block(keeps="function"),
            steps=(Step((Micro("stale", side="alone"),), zero=""), Step()),
            sharding="optim",
        ),
    ),
    Defect(
        "late",
        "weights are not gathered for what a unit computed after its result",
        _case(Block(keeps="branch"), steps=(Step((Micro(side="beside"),)),)),
    ),
)


def is_known(item: str) -> bool:
    """Whether its cases are expected to fail."""
    return item in KNOWN or item in REDUCED_TOO_OFTEN


def known_items(case: Description) -> list[str]:
    """Items whose defects this case would meet."""
    return [item for item, meets in KNOWN.items() if meets(case)]
