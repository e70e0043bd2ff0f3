"""Sampling inputs of a step and the reference sampler."""
