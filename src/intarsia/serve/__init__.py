"""A saved module in service: run on files, or served over HTTP."""
