"""Generation with Hugging Face models: programs for a prompt and for a token, and a cache they share."""

from intarsia.generation.compile import compile_generation as compile_generation
from intarsia.generation.generation import Generation as Generation
