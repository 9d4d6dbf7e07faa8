"""Runs of a saved module: on files, or over HTTP."""
