"""Lower rooms never import upper ones, and a few habits the engine must not fall into. Read from the source, function-local imports too."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_mfsdp
import lightning_mfsdp.engine as engine
import lightning_mfsdp.engine.internals as internals
import lightning_mfsdp.ops as ops
from tests.figures.code import Source, circles, import_edges

PACKAGE = Path(lightning_mfsdp.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ENGINE = sorted([*(PACKAGE / "base").rglob("*.py"), *(PACKAGE / "engine").rglob("*.py")])

LIGHTNING = ("lightning", "lightning_utilities", "torch", "torchmetrics")
# What each room may import besides the standard library. Rooms not listed are upper ones and may import everything, but for what is inside
# the engine (`DOORS`).
ALLOWED = {
    "base": {"torch", "tqdm", "triton", "lightning_mfsdp.base"},
    "engine": {"torch", "lightning_mfsdp.base", "lightning_mfsdp.engine"},
    "ops": {"torch", "triton", "lightning_mfsdp.ops", "lightning_mfsdp.base.alignment", "lightning_mfsdp.base.kernels"},
    # It finds the library by name, in one file (tests/te/test_library.py).
    "te": {
        "torch",
        "lightning_mfsdp.te",
        "lightning_mfsdp.base",
        "lightning_mfsdp.engine",
    },
    "float8": {"torch", "triton", "lightning_mfsdp.float8", "lightning_mfsdp.base"},
    "moe": {
        "torch",
        "triton",
        "lightning_mfsdp.moe",
        "lightning_mfsdp.base",
        "lightning_mfsdp.engine",
        "lightning_mfsdp.ops",
    },
    "mtp": {"torch", "lightning_mfsdp.mtp", "lightning_mfsdp.recompute"},
    "context_parallel": {"torch", "lightning_mfsdp.context_parallel", "lightning_mfsdp.base", "lightning_mfsdp.mtp"},
    "tensor_parallel": {
        "torch",
        "lightning_mfsdp.tensor_parallel",
        "lightning_mfsdp.base",
        "lightning_mfsdp.float8",
        "lightning_mfsdp.ops",
        "lightning_mfsdp.te",
    },
    "checkpoint": {
        "torch",
        "fsspec",
        "safetensors",
        "typing_extensions",
        "lightning_mfsdp.checkpoint",
        "lightning_mfsdp.base",
        "lightning_mfsdp.engine",
    },
    "profile": {"lightning_mfsdp.base", "lightning_mfsdp.profile"},
    "optim": {"torch", "triton", "lightning_mfsdp.optim", "lightning_mfsdp.base", "lightning_mfsdp.engine"},
    "recompute": {
        "torch",
        "lightning_mfsdp.recompute",
        "lightning_mfsdp.base",
        "lightning_mfsdp.engine",
        "lightning_mfsdp.te",
    },
    "launch": {
        *LIGHTNING,
        "lightning_mfsdp.base",
        "lightning_mfsdp.launch",
        "lightning_mfsdp._lightning_api",
    },
    "options": {
        *LIGHTNING,
        "lightning_mfsdp.base",
        "lightning_mfsdp.context_parallel",
        "lightning_mfsdp.engine",
        "lightning_mfsdp.float8",
        "lightning_mfsdp.moe",
        "lightning_mfsdp._lightning_api",
        "lightning_mfsdp.options",
        "lightning_mfsdp.recompute",
        "lightning_mfsdp.te",
        "lightning_mfsdp.tensor_parallel",
    },
    "trainer": {
        *LIGHTNING,
        "lightning_mfsdp.base",
        "lightning_mfsdp.checkpoint",
        "lightning_mfsdp.context_parallel",
        "lightning_mfsdp.engine",
        "lightning_mfsdp.launch",
        "lightning_mfsdp._lightning_api",
        "lightning_mfsdp.options",
        "lightning_mfsdp.recompute",
        "lightning_mfsdp.trainer",
    },
    "fabric": {
        *LIGHTNING,
        "lightning_mfsdp.base",
        "lightning_mfsdp.checkpoint",
        "lightning_mfsdp.context_parallel",
        "lightning_mfsdp.engine",
        "lightning_mfsdp.fabric",
        "lightning_mfsdp.launch",
        "lightning_mfsdp._lightning_api",
        "lightning_mfsdp.options",
        "lightning_mfsdp.recompute",
    },
}
# The one file of a lower room that turns towards Lightning.
EXCEPTIONS = {"checkpoint/lightning_io.py": {"lightning", "lightning_utilities"}}
# These run in every step: a host sync there costs every user.
HOT = (
    *("base/streams", "engine/comm/collectives", "engine/features/offload/own_step"),
    *(
        "engine/features/offload/offloaded_state",
        "engine/features/offload/streamed_step",
        "engine/features/offload/staging",
    ),
    *("engine/core/buffer", "engine/core/storage", "engine/optimizer/adopt", "engine/optimizer/norm"),
    *("engine/core/group", "engine/core/gradients", "engine/core/weights"),
    *(
        "engine/core/call",
        "engine/core/calls",
        "engine/core/context",
        "engine/core/reduction_schedule",
        "engine/core/unit",
    ),
)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def dotted(path: Path) -> str:
    """The name of a file's module."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    package = ("lightning_mfsdp", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield node.lineno, ".".join([*base, *([node.module] if node.module else [])])


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))


def is_attribute_call(call: ast.Call, *names: str) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in names


def is_function_call(call: ast.Call, *names: str) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in names


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(PACKAGE.parent)}:{line}"


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def test_a_room_imports_no_room_above_it():
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in FILES
        if room_of(path) in ALLOWED
        for line, module in imports(path)
        if module.split(".")[0] not in sys.stdlib_module_names
        and not any(
            module == name or module.startswith(f"{name}.")
            for name in ALLOWED[room_of(path)] | EXCEPTIONS.get(name_of(path), set())
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_with_a_rule_is_there():
    assert set(ALLOWED) <= {room_of(path) for path in FILES}
    assert EXCEPTIONS.keys() <= {name_of(path) for path in FILES}


def test_the_import_check_sees_local_and_relative_imports(tmp_path, monkeypatch):
    source = "def f():\n    from ..trainer.strategy import MFSDPStrategy\n    import lightning.pytorch\nfrom . import units\n"
    (tmp_path / "engine").mkdir()
    path = tmp_path / "engine" / "bad.py"
    path.write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert sorted(module for _, module in imports(path)) == [
        "lightning.pytorch",
        "lightning_mfsdp.engine",
        "lightning_mfsdp.trainer.strategy",
    ]


# How other rooms use the engine: its public names, and what it offers to them alone.
DOORS = {module.__name__: frozenset(module.__all__) for module in (engine, internals)}
OTHER_ROOMS = [path for path in FILES if room_of(path) not in ("base", "engine")]


def engine_imports(tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """Lines that name something of the engine: the module, and what of it; `None`: all of it, by a module's name."""
    inside = f"{engine.__name__}."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(alias.name, None) for alias in node.names if f"{alias.name}.".startswith(inside)]
        elif isinstance(node, ast.ImportFrom):
            given = [(f"{node.module}", alias.name) for alias in node.names]
            found = [(module, name) for module, name in given if f"{module}.{name}.".startswith(inside)]
        elif isinstance(node, ast.Attribute) and node.attr == "engine":
            found = [(text, None)] if (text := ast.unparse(node)) == engine.__name__ else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [(node.value, None)] if node.value.startswith(inside) else []  # for `import_module`
        else:
            continue
        yield from ((node.lineno, *one) for one in found)


def reaches(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines that use more of the engine than its doors offer, and what they use."""
    return [
        (line, f"{module}.{name}" if name else module)
        for line, module, name in engine_imports(tree)
        if name not in DOORS.get(module, ())
    ]


def test_other_rooms_use_what_the_engine_offers_and_nothing_inside_it():
    """Its files may then be moved and changed without looking at theirs."""
    wrong = [f"{where(path, line)} uses {used}" for path in OTHER_ROOMS for line, used in reaches(tree_of(path))]
    assert not wrong, "\n".join(wrong)


def test_tests_of_other_rooms_look_inside_the_engine_through_one_file():
    """`internals.py` of this folder: it follows when the engine's files change."""
    tests = Path(__file__).parents[1]
    others = [path for path in sorted(tests.rglob("*.py")) if path.parent != Path(__file__).parent]
    assert len(others) > 200
    wrong = [
        f"{path.relative_to(tests)}:{line} uses {used}"
        for path in others
        for line, used in reaches(ast.parse(path.read_text()))
        if path.parent.name != "figures"  # whose examples are names of modules
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_is_relative():
    """What `engine_imports` reads are names."""
    wrong = [
        where(path, node.lineno)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "from lightning_mfsdp.engine.core.group import owner_of",
        "def f():\n    from lightning_mfsdp.engine.core import group",
        "if TYPE_CHECKING:\n    from lightning_mfsdp.engine.core.unit import Unit",
        "import lightning_mfsdp.engine.core.unit",
        "import lightning_mfsdp.engine as engine",
        "from lightning_mfsdp import engine",
        "from lightning_mfsdp.engine import core",
        "from lightning_mfsdp.engine import internals",
        "from lightning_mfsdp.engine import fully_shard as shard, place_of",
        "from lightning_mfsdp.engine.internals import owner_of",
        "from lightning_mfsdp.engine.internals import *",
        "import lightning_mfsdp\nlightning_mfsdp.engine.core.unit.unit_of(1)",
        "import_module('lightning_mfsdp.engine.core.unit')",
    ],
)
def test_the_check_of_reaches_can_fail(source):
    assert reaches(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "from lightning_mfsdp.engine import fully_shard, units",
        "from lightning_mfsdp.engine.internals import Piece, view_of as found",
        "from lightning_mfsdp.engines import other",
    ],
)
def test_the_check_of_reaches_lets_doors_be_used(source):
    assert not reaches(ast.parse(source))


def test_all_that_the_engine_offers_to_other_rooms_is_used_explained_and_not_public():
    used = {
        name
        for path in OTHER_ROOMS
        for _, module, name in engine_imports(tree_of(path))
        if module == internals.__name__
    }
    assert used == set(internals.__all__)
    assert not used & set(engine.__all__), "public names come from the engine itself"
    assert used <= set(re.findall(r"\w+", f"{internals.__doc__}")), "its docstring says what each is for"


def test_the_engine_does_not_use_what_it_offers_to_other_rooms():
    files = [path for path in ENGINE if name_of(path) != "engine/internals.py"]
    assert [where(path, line) for path in files for line, module in imports(path) if module == internals.__name__] == []


# From the lowest up. A file imports lower rooms and its own.
LAYERS = (
    "base",
    "engine/layout",
    "engine/comm",
    "engine/core",
    "engine/optimizer",
    "engine/features",
    "engine/api",
    "engine",
)


def layer_of(name: str) -> int:
    """By the longest name of a room that a file's name begins with."""
    return max((len(room), index) for index, room in enumerate(LAYERS) if name.startswith(f"{room}/"))[1]


def file_of(module: str) -> str | None:
    """The file of base or engine that an imported module is; `None` for everything else."""
    path = PACKAGE.parent / module.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file in ENGINE:
            return name_of(file).removesuffix(".py")
    return None


def test_imports_of_the_engine_lead_down():
    found = {
        (name_of(path).removesuffix(".py"), target)
        for path in ENGINE
        for _, module in imports(path)
        if (target := file_of(module)) is not None and layer_of(target) > layer_of(name_of(path))
    }
    assert found == set()


def test_no_imports_go_in_circles():
    """Those inside functions count. Those for type checkers may, between files of the core: its objects know each other."""
    files = [Source(path, dotted(path), tree_of(path), set(), set(), set(), 0) for path in FILES]
    assert circles(import_edges(files, for_type_checkers=False)) == []
    edges = import_edges(files, for_type_checkers=True)
    core = f"{PACKAGE.name}.engine.core."
    assert [one for one in circles(edges) if not all(name.startswith(core) for name in one)] == []


def private_torch_names(tree: ast.AST) -> list[int]:
    """Lines that name or import something of torch that begins with an underscore."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            is_torch = ast.unparse(node.value).split(".")[0] in ("torch", "dist", "nn", "c10d")
            names = [node.attr] if is_torch else []
        elif isinstance(node, ast.ImportFrom):
            is_torch = (node.module or "").split(".")[0] == "torch"
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)] if is_torch else []
        elif isinstance(node, ast.Import):
            names = [
                part for alias in node.names if alias.name.split(".")[0] == "torch" for part in alias.name.split(".")
            ]
        else:
            continue
        if any(name.startswith("_") and not name.startswith("__") for name in names):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "source", ["import torch\ntorch._C.x()", "from torch._ops import A", "from torch import _x", "import torch._x.y"]
)
def test_the_check_of_private_names_can_fail(source):
    assert private_torch_names(ast.parse(source))


def test_private_torch_apis_are_used_in_compat_only():
    wrong = [
        where(path, line)
        for path in FILES
        if name_of(path) != "base/compat.py"
        for line in private_torch_names(tree_of(path))
    ]
    assert not wrong


def test_no_hasattr_state_no_print_no_bare_except():
    wrong = [
        where(path, call.lineno)
        for path in FILES
        for call in calls(path)
        if is_function_call(call, "print")
        or (is_function_call(call, "hasattr") and ast.unparse(call.args[0]) in ("self", "module"))
    ]
    wrong += [
        where(path, node.lineno)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not wrong, "\n".join(wrong)


def test_a_training_step_does_not_wait_for_the_device():
    """Nor does it use `record_stream`. Converting a tensor to a Python number waits as well; the one allowed is opt-in."""
    wrong = [
        f"{where(path, call.lineno)}: {ast.unparse(call)}"
        for path in (PACKAGE / f"{name}.py" for name in HOT)
        for call in calls(path)
        if is_attribute_call(call, "item", "tolist", "cpu", "numpy", "synchronize", "record_stream", "nonzero")
    ]
    assert not wrong, "\n".join(wrong)


def set_expressions(tree: ast.AST) -> set[str]:
    """Names and attributes that are assigned a set, so that loops over them can be found."""
    found = set()
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith(("set", "frozenset")):
            found.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign) and is_set(value, set()):
            found.update(ast.unparse(target) for target in node.targets)
    return found


def is_set(node: ast.AST | None, known: set[str]) -> bool:
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        return function.split("[")[0] in ("set", "frozenset")
    return node is not None and ast.unparse(node) in known


def loops_over_sets(tree: ast.AST) -> list[int]:
    known = set_expressions(tree)
    to_a_set = {id(loop) for node in ast.walk(tree) if isinstance(node, ast.SetComp) for loop in node.generators}
    return [
        node.iter.lineno
        for node in ast.walk(tree)
        if isinstance(node, (ast.For, ast.comprehension)) and id(node) not in to_a_set and is_set(node.iter, known)
    ]


def test_nothing_iterates_a_set():
    """Ranks would disagree on the order of collectives (upstream: Megatron-LM 6336)."""
    wrong = [where(path, line) for path in ENGINE for line in loops_over_sets(tree_of(path))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source", ["for x in set(y): pass", "s = {1}\nfor x in s: pass", "a.b: set[int] = f()\n[x for x in a.b]"]
)
def test_the_set_check_can_fail(source):
    assert loops_over_sets(ast.parse(source))


@pytest.mark.parametrize(
    "module", [lightning_mfsdp, engine, internals, ops], ids=["lightning_mfsdp", "engine", "internals", "ops"]
)
def test_public_names_are_sorted_and_importable(module):
    # Constants, then classes, then functions, as ruff sorts them.
    kind = {name: (not name.isupper(), name[0].islower(), name) for name in module.__all__}
    assert module.__all__ == sorted(kind, key=kind.__getitem__)
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


def assigned_names(tree: ast.Module) -> dict[str, ast.expr | None]:
    """What the top level of a file gives a name, and its value."""
    found: dict[str, ast.expr | None] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = None
        elif isinstance(node, ast.Assign):
            found.update({target.id: node.value for target in node.targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node.value
    return found


def missing_names(tree: ast.Module) -> set[str]:
    """Of `__all__`, those that the file does not define."""
    names = assigned_names(tree)
    offered = names.get("__all__")
    return set() if offered is None else set(ast.literal_eval(offered)) - names.keys()


def test_the_package_contains_python_alone():
    others = {
        path.suffix or path.name for path in PACKAGE.rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    }
    assert others == {".py", ".typed"}, others


def test_every_engine_file_defines_what_it_offers():
    wrong = {
        name_of(path): missing
        for path in ENGINE
        if name_of(path) not in ("engine/policy.py", "engine/internals.py") and path.name != "__init__.py"
        if (missing := missing_names(tree_of(path)))
    }
    assert not wrong, wrong


def test_the_check_of_offered_names_can_fail():
    source = "__all__ = ['a', 'b', 'C', 'd', 'e']\na = 1\nb: int = 2\nclass C: pass\ndef d(): e = 3\n"
    assert missing_names(ast.parse(source)) == {"e"}


FACTORIES = {
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"),
    *("scalar_tensor", "tensor", "zeros"),
}


def test_every_new_tensor_names_its_device() -> None:
    """A program may have set a default device, where `pin_memory` fails and a number on the host would not be one."""
    silent = [
        where(path, call.lineno)
        for path in FILES
        for call in calls(path)
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]
    assert silent == []


def test_one_file_of_the_engine_knows_axes_by_their_names() -> None:
    """Elsewhere an axis is an object with ranks: what depends on it follows from placements and sizes."""
    names = {"outer", "shard", "data", "context", "tensor", "expert"}
    constants = {name.upper() for name in names}

    def is_a_name(node: ast.expr) -> bool:
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return any(map(is_a_name, node.elts))
        if isinstance(node, ast.Constant):
            return node.value in names
        return isinstance(node, ast.Name) and node.id in constants

    found = [
        where(path, node.lineno)
        for path in ENGINE
        if path.relative_to(PACKAGE).as_posix() != "engine/comm/mesh.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and any(map(is_a_name, (node.left, *node.comparators)))
    ]
    assert found == []


# Daemon threads that are not ended with the interpreter, and why none of them comes back from C++ while it is finalized.
OTHER_THREADS = {
    "base/compat.py": "aborts communicators of a run that has failed",
    "base/bounded.py": "asks a store that may not answer, in a run that has failed",
    "launch/communication.py": "ends the process itself",
    "launch/second_sigterm.py": "calls Python alone",
    "launch/peers.py": "calls Python's sockets, and aborts communicators of a run that has failed",
}


def test_threads_that_may_call_pytorch_are_started_by_what_ends_them() -> None:
    starts = {name_of(path) for path in FILES for call in calls(path) if is_attribute_call(call, "Thread")}
    assert starts == {"base/threads.py", *OTHER_THREADS}
