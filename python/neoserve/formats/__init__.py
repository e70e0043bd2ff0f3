"""Checkpoint and quantisation formats, read into canonical tensors."""
