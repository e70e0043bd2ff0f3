"""Reusable layers of decoder-only models, written as calls on a Tracer."""
