"""Models with sharded parameters: FSDP2's collectives in a codec, and the parts of DTensors that replicas exchange."""
