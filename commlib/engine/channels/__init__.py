"""What a model communicates, each kind by a channel of its own."""
