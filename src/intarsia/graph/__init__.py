"""Facts about graphs: purity, sizes, aliasing, and what crosses the border of a segment."""
