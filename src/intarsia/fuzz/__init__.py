"""Random models, compiled and compared with themselves run eagerly: `intarsia fuzz`."""

from intarsia.fuzz.campaign import Campaign as Campaign
from intarsia.fuzz.check import Outcome as Outcome
from intarsia.fuzz.check import check as check
from intarsia.fuzz.draw import draw_case as draw_case
