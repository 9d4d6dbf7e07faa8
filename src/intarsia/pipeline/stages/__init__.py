"""Cutting any model into balanced stages."""
