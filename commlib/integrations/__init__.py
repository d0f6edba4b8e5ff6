"""Integrations with accelerate, Transformers and Lightning, each imported on demand."""
