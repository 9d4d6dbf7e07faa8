"""A cluster described by numbers, and the search for the fastest pipeline on it."""
