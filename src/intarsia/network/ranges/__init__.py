"""Which values the tensors of a network may have."""

from intarsia.network.ranges import elementwise as elementwise
from intarsia.network.ranges import linear as linear
from intarsia.network.ranges import movement as movement
from intarsia.network.ranges.interval import Interval as Interval
from intarsia.network.ranges.interval import whole as whole
from intarsia.network.ranges.rules import is_weight as is_weight
from intarsia.network.ranges.rules import layer_ranges as layer_ranges
from intarsia.network.ranges.rules import network_ranges as network_ranges
from intarsia.network.ranges.rules import range_of as range_of
