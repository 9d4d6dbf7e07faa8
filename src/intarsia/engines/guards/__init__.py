"""Conditions on values under which an engine answers as PyTorch does: planned, and checked at each call."""
