"""Measurements of what the project claims, one claim a module: `python -m benchmarks.NAME [--quick] [--out DIR]`."""
