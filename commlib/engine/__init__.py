"""Buckets, their boundaries, the order of collectives, and the threads and streams that drive them."""
