"""Compiled kernels, each behind one checked crossing: `native` for C++."""
