"""The layer network an engine is built from: ONNX, through `onnx_ir`."""

from intarsia.network import dtypes as dtypes
from intarsia.network import functional as functional
from intarsia.network.infer import infers as infers
from intarsia.network.network import Layer as Layer
from intarsia.network.network import Network as Network
from intarsia.network.network import Tensor as Tensor
from intarsia.network.network import default_net as default_net
from intarsia.network.network import net_guard as net_guard
from intarsia.network.signature import FLayerInfo as FLayerInfo
from intarsia.network.signature import FLayerInfoMemo as FLayerInfoMemo
from intarsia.network.signature import record_signature as record_signature
from intarsia.network.value import Dim as Dim
from intarsia.network.value import Shape as Shape
