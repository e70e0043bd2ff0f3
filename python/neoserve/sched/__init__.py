"""Admits, batches and ends requests: pure Python, no clock, no I/O."""
