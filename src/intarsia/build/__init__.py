"""Pieces to programs: convert, rewrite, build, try; what fails leaves its engine and the plan is repaired."""
