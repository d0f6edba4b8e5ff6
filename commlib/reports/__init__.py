"""Output of the command line: comparisons of algorithms, and topologies."""
