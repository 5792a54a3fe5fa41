"""Tensors into chunked arrays and back: packing, parts of several ranks, slices."""
