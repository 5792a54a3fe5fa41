"""Versions of weights and checkpoints on any object store; imports nothing of the rest of the project."""
