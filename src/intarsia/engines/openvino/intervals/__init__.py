"""Which values the tensors of a network may have."""

from intarsia.engines.openvino.intervals import elementwise as elementwise
from intarsia.engines.openvino.intervals import linear as linear
from intarsia.engines.openvino.intervals import movement as movement
from intarsia.engines.openvino.intervals.interval import Interval as Interval
from intarsia.engines.openvino.intervals.interval import whole as whole
from intarsia.engines.openvino.intervals.rules import is_weight as is_weight
from intarsia.engines.openvino.intervals.rules import layer_ranges as layer_ranges
from intarsia.engines.openvino.intervals.rules import network_ranges as network_ranges
from intarsia.engines.openvino.intervals.rules import range_of as range_of
