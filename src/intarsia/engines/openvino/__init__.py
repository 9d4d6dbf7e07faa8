"""OpenVINO on the CPU."""

from intarsia.engines.openvino.engine import OpenVINO as OpenVINO
