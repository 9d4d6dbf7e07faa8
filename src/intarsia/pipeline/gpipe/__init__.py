"""The interface of torchgpipe: a sequential module, cut into stages that run as a pipeline."""
