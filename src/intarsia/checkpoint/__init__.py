"""Models of Hugging Face folders, whose quantized weights stay in the bits that the files have."""

from intarsia.checkpoint.pretrained import load_pretrained as load_pretrained
