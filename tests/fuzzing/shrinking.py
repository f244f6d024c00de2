"""The smallest case that still fails: parts are left out, and what is said is put back to its default, as long as it fails alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzzing.description import Block, Configuration, Description, Micro, Model, Program, Step, size
from tests.fuzzing.drawing import settled


def shrunk(case: Description, fails: Callable[[Description], bool], budget_s: float = 120.0) -> Description:
    """The smallest case found within a time for which `fails` is true, as it is for `case`."""
    deadline = time.monotonic() + budget_s
    tried: set[Description] = set()
    found = True
    while found and time.monotonic() < deadline:
        found = False
        for candidate in map(settled, smaller(case)):
            if time.monotonic() > deadline:
                break
            if candidate in tried or size(candidate) >= size(case):
                continue
            tried.add(candidate)
            if fails(candidate):
                case, found = candidate, True
                break
    return case


def smaller(case: Description) -> Iterator[Description]:
    """Cases that say less, the boldest first."""
    model, program, configuration = case.model, case.program, case.configuration
    for fewer in range(1, configuration.ranks):
        yield replace(case, configuration=replace(configuration, ranks=fewer, outer=0, outer_sharding="no_shard"))
    for steps in _without_one(program.steps):
        yield replace(case, program=replace(program, steps=steps))
    for number in range(len(model.blocks)):
        if len(model.blocks) > 1:
            yield replace(case, model=replace(model, blocks=_without_block(model.blocks, number)))
    if program.loop == "automatic":
        for index in range(len(program.steps[0].micros) - 1):
            fewer_micros = tuple(replace(s, micros=s.micros[:index] + s.micros[index + 1 :]) for s in program.steps)
            yield replace(case, program=replace(program, steps=fewer_micros))
    else:
        for number, step in enumerate(program.steps):
            for micros in _without_one(step.micros):
                yield _with_step(case, number, replace(step, micros=micros))
    yield replace(case, model=replace(Model(), blocks=model.blocks))
    yield replace(case, configuration=Configuration(ranks=configuration.ranks))
    for number, block in enumerate(model.blocks):
        for plainer in (Block(), *_plainer(block)):
            blocks = (*model.blocks[:number], plainer, *model.blocks[number + 1 :])
            yield replace(case, model=replace(model, blocks=blocks))
    for number, step in enumerate(program.steps):
        for plainer_step in (replace(Step(), micros=step.micros, **_kept(program, step)), *_plainer(step)):
            yield _with_step(case, number, plainer_step)
        for index, micro in enumerate(step.micros):
            for plainer_micro in (replace(Micro(), sync=micro.sync), *_plainer(micro)):
                yield _with_step(case, number, _with_micro(step, index, plainer_micro))
    for plainer_program in _plainer(program):
        if plainer_program.loop == program.loop or program.loop == "manual":
            yield replace(case, program=plainer_program)
    for plainer_model in _plainer(model):
        yield replace(case, model=plainer_model)
    for plainer_configuration in _plainer(configuration):
        if plainer_configuration.ranks == configuration.ranks:
            if not plainer_configuration.outer:
                plainer_configuration = replace(plainer_configuration, outer_sharding="no_shard")
            yield replace(case, configuration=plainer_configuration)


def _kept(program: Program, step: Step) -> dict[str, Any]:
    """What Lightning's own loop says of every step."""
    return {"zero": step.zero, "zero_at": step.zero_at} if program.loop == "automatic" else {}


def _without_one(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if len(items) > 1:
        for number in range(len(items)):
            yield items[:number] + items[number + 1 :]


def _without_block(blocks: tuple[Block, ...], number: int) -> tuple[Block, ...]:
    def moved(index: int) -> int:
        return -1 if index == number else index - (index > number)

    rest = blocks[:number] + blocks[number + 1 :]
    return tuple(replace(block, same_as=moved(block.same_as), tied_to=moved(block.tied_to)) for block in rest)


def _plainer(part: Any) -> Iterator[Any]:
    default = type(part)()
    for field in fields(part):
        value = getattr(default, field.name)
        if field.name not in ("blocks", "steps", "micros") and getattr(part, field.name) != value:
            yield replace(part, **{field.name: value})


def _with_step(case: Description, number: int, step: Step) -> Description:
    steps = case.program.steps
    if case.program.loop == "automatic":  # Lightning's loop says the same of every step
        steps = tuple(replace(other, zero=step.zero, zero_at=step.zero_at) for other in steps)
    steps = (*steps[:number], step, *steps[number + 1 :])
    return replace(case, program=replace(case.program, steps=steps))


def _with_micro(step: Step, index: int, micro: Micro) -> Step:
    return replace(step, micros=(*step.micros[:index], micro, *step.micros[index + 1 :]))
