"""Processes that run a program as `python program arguments` does, forked from the server that has imported what is heavy.

What starts anew imports PyTorch and Lightning first, for six seconds of a processor.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.helpers.lasting_ranks import forking


class Forked:
    """One of them, with what `subprocess.Popen` has for waiting and killing.

    Args:
        command: A program's path, or "-m" and a module's name; then its arguments.
        env: All of its environment.
        output: A file for what it writes to stdout and stderr.
        cwd: Its folder.
        first: Called in the process, before the program; importable.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        output: Path,
        cwd: Path,
        first: Callable[[], None] | None = None,
    ) -> None:
        self.command = list(command)
        arguments = (self.command, dict(env), output, cwd, first)
        self._process = forking().Process(target=_main, args=arguments)  # no daemon: a program may start processes
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.command, timeout or 0)
        return code

    def kill(self) -> None:
        self._process.kill()


def run(command: Sequence[str], env: Mapping[str, str], output: Path, cwd: Path, timeout: float) -> tuple[int, str]:
    """Its exit code, and what it wrote; it is killed when time is up.

    Raises:
        subprocess.TimeoutExpired: It was.
    """
    process = Forked(command, env, output, cwd)
    try:
        code = process.wait(timeout)
    finally:
        process.kill()
    return code, output.read_text()


def _main(command: list[str], env: dict[str, str], output: Path, cwd: Path, first: Callable[[], None] | None) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if first is not None:
        first()
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
