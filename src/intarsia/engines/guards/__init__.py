"""Which values must hold so that an engine answers as PyTorch does, planned and looked at."""
