"""What `lightning_mfsdp` shows: public names and rooms, of which it imports those it needs itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lightning_mfsdp
from tests.helpers.programs import run_as_if_first

PACKAGE = Path(lightning_mfsdp.__file__).parent
ROOMS = {
    "callbacks",
    "checkpoint",
    "context_parallel",
    "fabric",
    "moe",
    "mtp",
    "ops",
    "optim",
    "ray",
    "recompute",
    "te",
    "tensor_parallel",
}
# The Trainer's strategy needs the others.
LAZY = {"callbacks", "fabric", "moe", "mtp", "ops", "optim", "ray"}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """By a process that imports the package for the first time: rooms that are loaded then, and a name of a room that is not."""
    program = (
        "import lightning_mfsdp\n"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('lightning_mfsdp.')})\n"
        f"for room in {sorted(LAZY)}:\n"
        "    assert getattr(lightning_mfsdp, room) is sys.modules[f'lightning_mfsdp.{room}']\n"
        "    assert room in vars(lightning_mfsdp)\n"
        "print(lightning_mfsdp.moe.TopKRouter.__name__)"
    )
    return run_as_if_first(tmp_path_factory.mktemp("names"), program).splitlines()[-2:]


def test_dir_shows_public_names_alone():
    assert dir(lightning_mfsdp) == sorted({*lightning_mfsdp.__all__, *ROOMS, "__version__"})
    for name in dir(lightning_mfsdp):
        assert getattr(lightning_mfsdp, name) is not None


def test_importing_the_package_loads_no_room_that_it_does_not_need(printed):
    loaded = printed[0].split()
    assert set(loaded) >= ROOMS - LAZY
    assert LAZY & set(loaded) == set()


def test_a_room_is_an_attribute_at_its_first_use(printed):
    assert printed[1:] == ["TopKRouter"]


def test_names_that_do_not_exist_raise_as_everywhere():
    assert not hasattr(lightning_mfsdp, "fuly_shard")
    with pytest.raises(AttributeError, match="module 'lightning_mfsdp' has no attribute 'fuly_shard'"):
        _ = lightning_mfsdp.fuly_shard


def test_type_checkers_see_each_room():
    """They know a lazy attribute by an import that only they execute, with `as`, which marks it as public."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    shown = [
        (alias.name, alias.asname) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert shown == [(room, room) for room in sorted(ROOMS)]


def test_files_beside_the_rooms_are_private_or_public_rooms():
    files = {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("_")}
    assert files <= ROOMS
