"""Models from Hugging Face folders, whose quantized weights stay as packed as in the files."""

from intarsia.checkpoint.pretrained import load_pretrained as load_pretrained
