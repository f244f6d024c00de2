"""Which code of a model takes part when its state dict is loaded: overridden methods and hooks, of any module in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.checkpoint.state.index import plain_name

__all__ = ["LoadCode"]

# These notify the engine, which loading does anyway, or only put names of wrappers into names.
_OURS = ("lightning_mfsdp.", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
# Their code loads what it is given: it neither leaves entries out nor compares them with the values so far.
_LIBRARIES = ("torch.", "torchmetrics.", "transformer_engine.")


@dataclass
class LoadCode:
    """Where in a model such code is.

    Attributes:
        runs: Whether there is any.
        prefixes: Plain names of the modules, with a dot, whose code sees the entries below them before they are loaded.
        changing: Those among them whose code is the program's own, and may need present values as well.
    """

    runs: bool = False
    prefixes: set[str] = field(default_factory=set)
    changing: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, module: nn.Module) -> LoadCode:
        """Look through a model."""
        found = cls()
        if getattr(module.load_state_dict, "__func__", None) is not nn.Module.load_state_dict:
            found._add("", module.load_state_dict)
        for name, part in module.named_modules(remove_duplicate=False):
            before, after = compat.load_code(part)
            for code in before:
                found._add(plain_name(f"{name}." if name else ""), code)
            own_state = getattr(part.set_extra_state, "__func__", None) is not nn.Module.set_extra_state
            found.runs |= own_state or any(not _origin(code).startswith(_OURS) for code in after)
        return found

    def sees(self, name: str) -> bool:
        """Whether such code sees the entry of a plain name, and may have it loaded in another form."""
        return name.startswith(tuple(self.prefixes))

    def may_change(self, name: str) -> bool:
        """Whether the program's own code does."""
        return name.startswith(tuple(self.changing))

    def _add(self, prefix: str, code: Any) -> None:
        origin = _origin(code)
        if origin.startswith(_OURS):
            return
        self.runs = True
        self.prefixes.add(prefix)
        if not origin.startswith(_LIBRARIES):
            self.changing.add(prefix)


def _origin(code: Any) -> str:
    """The module of a function, a method, a partial or a callable object."""
    function = getattr(code, "func", code)
    return str(getattr(function, "__module__", None) or type(function).__module__)
