"""Rewrites of ATen graphs, for engines that read graphs: less memory moved, fewer and larger kernels.

A rewrite edits a graph module in place, which is the engine's own copy, and keeps its answers up to rounding.
"""

from intarsia.engines.graph_rewrites.apply import REWRITES as REWRITES
from intarsia.engines.graph_rewrites.apply import apply_rewrites as apply_rewrites
from intarsia.engines.graph_rewrites.apply import own_copy as own_copy
from intarsia.engines.graph_rewrites.apply import paying as paying
from intarsia.engines.graph_rewrites.convolutions import image_convolutions as image_convolutions
from intarsia.engines.graph_rewrites.products import has_only_bfloat16_products as has_only_bfloat16_products
from intarsia.engines.graph_rewrites.products import has_only_one_row_products as has_only_one_row_products
from intarsia.engines.graph_rewrites.products import one_row_products as one_row_products
