"""Models with sharded parameters: the parts of DTensors that a rank communicates with its replicas."""
