"""Where the time of a training step goes: reads what torch.profiler has recorded, sums it up by kind, and says what to try first."""

from lightning_mfsdp.profile.breakdown import Breakdown, break_down
from lightning_mfsdp.profile.report import report
from lightning_mfsdp.profile.trace import Event, Trace, read_trace

__all__ = ["Breakdown", "Event", "Trace", "break_down", "read_trace", "report"]
