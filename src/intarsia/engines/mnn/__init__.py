"""MNN: a third kind of kernels for the CPU, fastest for many convolutional models."""

from intarsia.engines.mnn.engine import MNN as MNN
from intarsia.engines.mnn.engine import MNNFp16 as MNNFp16
