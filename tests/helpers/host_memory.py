"""How much host memory something takes, in bytes. For processes of `run_distributed(..., fresh=True)`."""

from __future__ import annotations

import threading
from pathlib import Path

# Set in the environment of such processes: what is freed leaves them at once, so that it is not mistaken for memory that was there before.
FREED_AT_ONCE = ("MALLOC_MMAP_THRESHOLD_", "65536")


def anonymous_bytes() -> int:
    """Memory of this process that is no mapped file: `RssAnon`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


class Meter:
    """The most anonymous memory that a process had meanwhile, beyond what it had before."""

    def __enter__(self) -> Meter:
        self._stopped = threading.Event()
        self._before = self._most = anonymous_bytes()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def look(self, *_: int) -> None:
        """Also as `progress`, where the most is to be expected."""
        self._most = max(self._most, anonymous_bytes())

    def _watch(self) -> None:
        while not self._stopped.wait(0.002):
            self.look()

    def __exit__(self, *_: object) -> None:
        self.look()
        self._stopped.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        return self._most - self._before
