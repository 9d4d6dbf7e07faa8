"""torchgpipe's interface: a sequential module cut into stages that train and infer as a pipeline."""
