"""Models whose parameters are sharded: what of a DTensor a rank communicates with its replicas."""
