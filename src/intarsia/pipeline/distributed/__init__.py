"""Stages on several processes, through torch.distributed."""
