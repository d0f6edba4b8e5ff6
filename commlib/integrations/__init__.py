"""commlib in the trainers that people use: `accelerate`, `transformers` and `lightning`, each imported when asked for."""
