"""commlib in the trainers that people use: accelerate, Transformers and Lightning, each imported when asked for."""
