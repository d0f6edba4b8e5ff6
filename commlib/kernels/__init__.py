"""Compiled kernels. `native` is the only module that calls the C++ extension, with checked arguments."""
