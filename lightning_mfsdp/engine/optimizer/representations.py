"""Representations: what an optimizer's `param_groups` and `state` hold while its own code runs, and at all other times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_mfsdp.base.containers import are_same
from lightning_mfsdp.engine.optimizer.flat_rows import FlatRows, flat_rows_of
from lightning_mfsdp.engine.optimizer.shown_state import ShownState, StateTable

__all__ = ["Representations", "hold"]


class Representations:
    """What one optimizer holds: local rows and their state while its own code runs, and what the module shows at all other times.

    Where both are the same nothing happens here. State is not kept twice: what is shown of it is a view (shown_state.py). Rows of
    neighbors are stepped as one tensor wherever they can be (flat_rows.py).

    Attributes:
        stepped: What the optimizer steps, in the order of `param_groups`: local rows, some of them as flat rows.
        shown: What `param_groups` hold while its own code does not run.
        is_running: The optimizer's own code runs, or has raised.
    """

    def __init__(self, stepped: Sequence[list[Tensor]] = (), shown: Sequence[list[Tensor]] | None = None) -> None:
        self._stepped, self._shown = stepped, stepped if shown is None else shown  # by entry of `param_groups`
        self.stepped, self.shown = (
            [one for held in entries for one in held] for entries in (self._stepped, self._shown)
        )
        self.is_running = False
        self._flat: list[FlatRows] = []
        self._flat_of: dict[Tensor, FlatRows] = {}
        # Of the last step, or of the one that is running: what is stepped as flat rows, and what `param_groups` hold.
        self._together: list[FlatRows] = []
        self._in_step: Sequence[list[Tensor]] = stepped

    @property
    def differ(self) -> bool:
        """Whether there are two of them."""
        return self._shown is not self._stepped

    def are_shown(self, optimizer: Optimizer) -> bool:
        """Whether `param_groups` hold what they did between the last steps, each entry the same."""
        entries = optimizer.param_groups
        return len(entries) == len(self._shown) and all(
            are_same(entry["params"], shown) for entry, shown in zip(entries, self._shown, strict=True)
        )

    def flatten(self, optimizer: Optimizer) -> None:
        """Step rows of neighbors as one tensor from now on: the optimizer is elementwise, and nothing else works on rows."""
        self._flat = flat_rows_of(self._stepped)
        self._flat_of = {member.local: flat for flat in self._flat for member in flat.members}
        self.show_state(optimizer)

    def show_state(self, optimizer: Optimizer) -> None:
        """Show the state, if something else was put in its place."""
        state: Any = optimizer.state
        if (
            self.differ
            and not self.is_running
            and (type(state) is not ShownState or state.plain.flat is not self._flat_of)
        ):
            optimizer.state = ShownState(state, self._new_table())  # type: ignore[assignment]

    def begin(self, optimizer: Optimizer) -> None:
        """Put what the optimizer steps into `param_groups` and `state`: its own code is about to run."""
        if self.is_running or not self.differ:
            return
        self.show_state(optimizer)
        state: Any = optimizer.state
        entries = optimizer.param_groups
        table = state.plain
        on_cpu = any(flat.rows.is_cpu for flat in self._flat[:1])
        may_join = [_may_join(entry, on_cpu=on_cpu) for entry in entries]
        together: list[FlatRows] = []
        for flat in self._flat:
            if may_join[flat.number] and flat.have_gradients_together() and table.join(flat):
                together.append(flat)
            else:
                table.separate(flat)
        if together != self._together:
            self._together, self._in_step = together, _with_flat_rows(self._stepped, together)
        # Nothing can fail from here on.
        self.is_running = True
        for flat in together:
            flat.begin_step()
        for entry, held in zip(entries, self._in_step, strict=True):
            hold(entry, held)
        optimizer.state = table

    def end(self, optimizer: Optimizer) -> None:
        """Put what the module shows into `param_groups` and `state`: the optimizer's own code has run."""
        if self.is_running:
            self.is_running = False
            for flat in self._together:
                flat.end_step()
            self._show(optimizer)
            optimizer.state = ShownState.over(optimizer.state)  # type: ignore[assignment, arg-type]

    def end_unfinished(self, optimizer: Optimizer) -> None:
        """As `end`, where the optimizer's own code may have raised: the user may have put anything into the state since."""
        if self.is_running:
            state: Any = optimizer.state
            if isinstance(state, StateTable):
                state.separate_all()
            for flat in self._together:
                flat.end_failed_step()
            self.end(optimizer)
            optimizer.state = ShownState(state, self._new_table())  # type: ignore[assignment]

    def _new_table(self) -> StateTable:
        return StateTable(self.stepped, self._flat_of)

    def _show(self, optimizer: Optimizer) -> None:
        """Put back into `param_groups` what the module shows. Entries that someone has exchanged meanwhile stay."""
        entries = optimizer.param_groups
        if len(entries) == len(self._in_step) and all(
            are_same(entry["params"], held) for entry, held in zip(entries, self._in_step, strict=True)
        ):
            for entry, shown in zip(entries, self._shown, strict=True):
                hold(entry, shown)
            return
        instead = {id(local): [shown] for local, shown in zip(self.stepped, self.shown, strict=True)}
        for flat in self._together:
            instead[id(flat.rows)] = [shown for member in flat.members for shown in instead[id(member.local)]]
        for entry in entries:
            hold(entry, [shown for one in entry["params"] for shown in instead.get(id(one), [one])])


def hold(group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
    """Put parameters into an entry of `param_groups`; a list stays the same object, so references to it see the change."""
    if isinstance(group["params"], list):
        group["params"][:] = parameters
    else:
        group["params"] = list(parameters)


def _may_join(options: Mapping[str, Any], *, on_cpu: bool) -> bool:
    """Whether rows that an entry of `param_groups` holds may be stepped as one tensor.

    What is `capturable` may be recorded in a graph, which goes on with the state that it was recorded with. `foreach=False` asks for
    memory of one parameter at a time; PyTorch's `fused` kernels for CPUs round the last few numbers otherwise than those before.
    """
    is_alone = options.get("capturable") or options.get("differentiable") or options.get("foreach") is False
    return not (is_alone or (on_cpu and options.get("fused")))


def _with_flat_rows(stepped: Iterable[list[Tensor]], together: Iterable[FlatRows]) -> list[list[Tensor]]:
    """Entries with flat rows in the place of the first of their members."""
    instead: dict[int, list[Tensor]] = {}
    for flat in together:
        instead |= {id(member.local): [] for member in flat.members}
        instead[id(flat.members[0].local)] = [flat.rows]
    return [[one for local in entry for one in instead.get(id(local), [local])] for entry in stepped]
