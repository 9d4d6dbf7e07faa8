"""Measurements and builds of this machine, stored on disk."""
