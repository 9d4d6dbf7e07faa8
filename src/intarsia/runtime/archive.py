"""The former place of `intarsia.archive`; this alias stays for one release."""

from intarsia.archive import load as load
from intarsia.archive import save as save
