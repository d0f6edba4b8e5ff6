"""Flat buffers and the parameters whose tensors are views of them."""
