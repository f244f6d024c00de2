"""Questions to others that may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["answer_within"]

T = TypeVar("T")


def answer_within(seconds: float, question: Callable[[], T], otherwise: T) -> T:
    """What a function returns; `otherwise` if it takes longer, or raises a RuntimeError. Its thread goes on, and ends with the process.

    Args:
        seconds: How long to wait.
        question: Asks something that may be out of reach, such as the store of ranks on another host.
        otherwise: The result without an answer.
    """
    answers = [otherwise]

    def ask() -> None:
        try:
            answers.append(question())
        except RuntimeError:  # the other end is gone; the caller has an error to report already
            return

    thread = threading.Thread(target=ask, name="mfsdp-question", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[-1]
