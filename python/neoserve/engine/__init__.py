"""The step loop, its clients and the scripted fake executor."""
