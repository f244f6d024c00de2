"""Rank 0 of a host with three ranks, which starts its relay: `python -S tests/stops/starting_rank.py`. It imports no torch.

Prints how the relay is reached, then what it is told of failures, and goes on until its connection ends.
"""

from __future__ import annotations

import json
import sys

from channel import LOOPBACK, loaded_relay, wait_for


def say(what: object) -> None:
    """A line of output."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    relay = loaded_relay()
    with relay.start("node", [0, 1, 2], 3, is_reachable=False) as (port, token):
        contact = [LOOPBACK, port, token]
        line = relay.connect(contact, [0], "node", contact)
    line.send({"at work": True})
    say(contact)
    say(wait_for([line], "apart"))
    line.receive()
