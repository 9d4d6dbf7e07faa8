"""Building: pieces become programs, which are compared with PyTorch; a plan whose pieces fail is repaired."""
