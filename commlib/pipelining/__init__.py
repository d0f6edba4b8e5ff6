"""Wrapped models that are stages of a pipeline."""
