"""The operations, a file a family; `intarsia.network.functional` gathers them."""
