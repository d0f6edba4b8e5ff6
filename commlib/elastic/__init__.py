"""Training with ranks that come and go. See `docs/explanation/elastic.md`."""
