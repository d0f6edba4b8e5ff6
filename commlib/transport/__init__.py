"""The verbs of communication and their executors."""
