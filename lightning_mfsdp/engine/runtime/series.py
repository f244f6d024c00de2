"""Series: a unit of several modules that run one after the other, gathered once before the first and given back after the last.

Small blocks cost more to gather, reduce and wait for than their bytes do. As one unit, a few of them pay once. Their number in a
unit is the user's choice; what follows here holds for any program that calls them:

    the next module of the series is called     the unit stays as it is
    anything else                               what was running is given back, and the call begins a run of its own

so a skipped module, another order, a change of grad mode or a recomputation are never wrong, only gathered more often. Every
module's result is listened to: a backward may begin at any of them. Called by themselves, outside of the root's forward, modules run one
by one, so that nothing stays gathered afterwards.

Source: `torch.distributed.fsdp.fully_shard` also takes a list of modules; its pre-forward runs before the first and its
post-forward once all have run.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.runtime.calls import cast_inputs

if TYPE_CHECKING:
    from lightning_mfsdp.engine.runtime.unit import Unit

__all__ = ["Series"]


class Series:
    """Where a unit of several modules stands in its run.

    Attributes:
        busy: One of its modules is running at the moment.
    """

    def __init__(self, unit: Unit, length: int) -> None:
        self._unit = weakref.ref(unit)
        self._last = length - 1
        self._next = 0
        self._with_grad = True
        self.busy = False

    def pre_forward(
        self, unit: Unit, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before module `index`: go on with the run, or begin one."""
        expected = 0 < index == self._next and unit.live and compat.backward_task() == -1
        going_on = expected and self._with_grad == torch.is_grad_enabled()
        if going_on:
            unit.install()
            args, kwargs = cast_inputs(unit, args, kwargs)
            unit.note_run()
        else:
            self.stop()
            args, kwargs = unit.pre_forward(module, args, kwargs)
            self._with_grad = torch.is_grad_enabled()
        self.busy = True
        unit.context.note_series(self)
        return args, kwargs

    def post_forward(self, unit: Unit, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After module `index`; also runs when its forward raised, with `output` None."""
        self.busy = False
        failed = output is None and sys.exc_info()[0] is not None
        if failed or index == self._last or compat.backward_task() != -1 or not unit.is_inside_root:
            self._next = 0
            unit.context.note_series(None)
            unit.post_forward(module, args, output)
        else:
            self._next = index + 1
            unit.context.note_series(self)
            unit.listen_to_result(unit.open_call, output)
            if not unit.is_inside_forward_of_root:  # what comes next is code of a step, which sees sharded weights
                unit.hide()

    def stop(self) -> None:
        """The run ends here, before the last module, if there is one."""
        unit = self._unit()
        if self._next and unit is not None:
            self._next = 0
            unit.context.note_series(None)
            unit.close()
