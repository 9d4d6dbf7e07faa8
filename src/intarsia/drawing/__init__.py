"""Pictures of plans: a page for the browser, SVG for documents, JSON for Model Explorer.

This package imports neither torch nor plans: `graph/plan_text.py` turns a plan into a `Drawing`.
"""

from intarsia.drawing.drawing import Drawing as Drawing
from intarsia.drawing.drawing import DrawnLayers as DrawnLayers
from intarsia.drawing.drawing import DrawnNode as DrawnNode
from intarsia.drawing.drawing import DrawnSegment as DrawnSegment
from intarsia.drawing.drawing import DrawnTrial as DrawnTrial
from intarsia.drawing.drawing import Pictured as Pictured
from intarsia.drawing.drawing import bytes_text as bytes_text
from intarsia.drawing.drawing import framed as framed
from intarsia.drawing.drawing import model_explorer as model_explorer
from intarsia.drawing.drawing import page as page
from intarsia.drawing.drawing import svg as svg
