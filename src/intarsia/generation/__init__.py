"""Generation with Hugging Face models: programs for a prompt and for a token, and a cache they share."""

from intarsia.generation.archive import load as load
from intarsia.generation.archive import save as save
from intarsia.generation.compile import compile_generation as compile_generation
from intarsia.generation.generation import Generation as Generation
