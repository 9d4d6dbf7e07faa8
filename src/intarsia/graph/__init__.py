"""What a cut needs to know of a graph: purity, sizes, what crosses a border."""
