"""Compiled modules as files: saved once, loaded in any process, with no code and no pickle inside."""

from intarsia.runtime.archive.load import load as load
from intarsia.runtime.archive.save import save as save
