"""One file per architecture: compositions of blocks, found by name (see registry.py)."""
