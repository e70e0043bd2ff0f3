"""What scores models: clients of the public interfaces."""
