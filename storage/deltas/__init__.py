"""Versions as what changed since another one."""
