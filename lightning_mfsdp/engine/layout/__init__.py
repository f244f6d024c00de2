"""Where each parameter lies in a flat buffer, and what is sharded over which mesh axis: pure arithmetic."""
