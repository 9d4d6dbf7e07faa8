"""ExportedProgram to the graph the partitioner sees: functional ATen, weights as attributes."""

from intarsia.lower.lower import lower as lower
from intarsia.lower.lowered import GraphInput as GraphInput
from intarsia.lower.lowered import GraphOutput as GraphOutput
from intarsia.lower.lowered import Lowered as Lowered
from intarsia.lower.lowered import Role as Role
from intarsia.lower.passes import lowering_pass as lowering_pass
from intarsia.lower.purity import pure_operators as pure_operators
