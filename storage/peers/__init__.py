"""Hosts that read a store's chunks from each other."""
