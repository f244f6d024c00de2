"""Folders of safetensors files, as Hugging Face writes and reads them."""
