"""What the command line prints and draws: comparisons of algorithms, and topologies."""
