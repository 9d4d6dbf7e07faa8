"""Generation with Hugging Face models: programs for prompts and for single tokens, and their shared cache."""

from intarsia.generation.archive import load as load
from intarsia.generation.archive import save as save
from intarsia.generation.compile import Generation as Generation
from intarsia.generation.compile import compile_generation as compile_generation
