"""Checkpoints of sharded models: every rank writes its own rows. Files that hold whole tensors can be read as well.

For models of other libraries: `load_safetensors` reads pretrained weights into shards, `export_model` and `export_checkpoint` write
what Hugging Face's `from_pretrained` reads. `load_checkpoint` is `torch.load` for directories. `convert_checkpoint` converts those of other
programs to directories.
"""

from lightning_mfsdp.checkpoint.safetensors.export import export_checkpoint, export_model
from lightning_mfsdp.checkpoint.safetensors.load import load_safetensors
from lightning_mfsdp.checkpoint.tools.convert import convert_checkpoint
from lightning_mfsdp.checkpoint.tools.reading import load_checkpoint

__all__ = ["convert_checkpoint", "export_checkpoint", "export_model", "load_checkpoint", "load_safetensors"]
