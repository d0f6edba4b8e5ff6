"""What the families of algorithms share: an algorithm's own file has only what is its own."""
