"""Programs in files of their own, run as somebody runs them who copied them: nothing is set up for them but a folder.

`run_forked` forks them from the server that has imported what is heavy; `run_plain` starts `python` for each.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from tests.helpers.forked import Forked
from tests.helpers.nights import NIGHT

TIMEOUT_S = 120
# What tells a process that somebody launched it as a rank; a training in the process of the tests leaves it behind.
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
# What Lightning advises programs on little data, and does itself.
FOREIGN_WARNINGS = (
    ".*isinstance.treespec, LeafSpec.*",
    ".*does not have many workers.*",
    ".*is smaller than the logging interval.*",
    ".*is not supported by the model summary.*",
    ".*`tensorboardX` has been removed as a dependency.*",
    ".*Profiler clears events at the end of each cycle.*",  # torch 2.11, of every profile
)


class ProgramError(AssertionError):
    """A program failed or did not end; carries what it wrote."""


def run_forked(program: Path, *arguments: str, expected: tuple[str, ...] = (), timeout_s: float = TIMEOUT_S) -> str:
    """What the program writes, in its folder, without CUDA devices and network, and with warnings as errors but `expected` ones.

    Raises:
        ProgramError: It fails, or takes longer.
    """
    output = program.with_suffix(".out")
    first = partial(_strictly, expected)
    process = Forked([str(program), *arguments], _environment(), output, program.parent, first)
    try:
        code: int | None = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
        _kill(process.pid)
        process.wait()
    return _judge(program, code, output.read_text() if output.exists() else "")


# Before a program that imports the package as if nobody had; Lightning and PyTorch are there already.
AS_IF_FIRST = """
import sys
import warnings

warnings.simplefilter("ignore")
for name in [name for name in sys.modules if name.split(".")[0] == "lightning_mfsdp"]:
    del sys.modules[name]
"""


def run_as_if_first(folder: Path, code: str) -> str:
    """What a program writes that imports the package for the first time; at night by `python`, for which everything is the first time.

    Raises:
        ProgramError: It fails, or takes longer.
    """
    program = folder / "first_import.py"
    program.write_text(AS_IF_FIRST + code)
    return run_plain(program) if NIGHT else run_forked(program)


def run_plain(program: Path, *arguments: str, timeout_s: float = TIMEOUT_S, gpus: bool = False) -> str:
    """The same by `python`, which warns as it always does; with the CUDA devices of the machine if it needs them.

    Raises:
        ProgramError: It fails, or takes longer.
    """
    process = subprocess.Popen(
        [sys.executable, str(program), *arguments],
        cwd=program.parent,
        env=_environment(hidden=not gpus),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process.pid)
        output, _ = process.communicate()
        return _judge(program, None, output)
    return _judge(program, process.returncode, output)


def _environment(*, hidden: bool = True) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return own | {"CUDA_VISIBLE_DEVICES": ""} if hidden else own


def _judge(program: Path, code: int | None, output: str) -> str:
    if code != 0:
        ended = "did not end" if code is None else f"ended with exit code {code}"
        raise ProgramError(f"{program} {ended}; it wrote:\n{output}")
    return output


def _kill(pid: int | None) -> None:
    """End a leader of a session with all that it started."""
    assert pid is not None
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        return


def _strictly(expected: tuple[str, ...]) -> None:
    """In a session of its own, with warnings as errors but `expected` ones, and without a network."""
    os.setsid()
    warnings.resetwarnings()
    warnings.simplefilter("error")
    for message in (*FOREIGN_WARNINGS, *expected):
        warnings.filterwarnings("ignore", message=message)
    sys.addaudithook(_refuse_network)


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # a path for sockets of this machine
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in (None, "", "localhost", "127.0.0.1", "::1", socket.gethostname()):
        raise OSError(f"a program on a page needs no network, and this one asks for {host!r}")
