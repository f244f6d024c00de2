"""Checkpoints of sharded models. `sharded`: every rank writes its own rows; `full`: reading files that hold whole tensors.

For models of other libraries: `load_safetensors` reads pretrained weights into shards, `export_model` and `export_checkpoint` write
what Hugging Face's `from_pretrained` reads. `load_checkpoint` is `torch.load` for directories.
"""

from lightning_mfsdp.checkpoint.reading import load_checkpoint
from lightning_mfsdp.checkpoint.safetensors_export import export_checkpoint, export_model
from lightning_mfsdp.checkpoint.safetensors_load import load_safetensors

__all__ = ["export_checkpoint", "export_model", "load_checkpoint", "load_safetensors"]
