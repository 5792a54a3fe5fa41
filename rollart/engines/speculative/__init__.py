"""Speculative decoding for the embedded engine: drafts, and a verification that leaves the distribution of what is sampled as it was."""
