"""`commlib doctor --peers`: measure the connections between the ranks of a job, and warn about their network."""
