"""Code shared by families of algorithms."""
