"""Assigns parameters to buckets: measurement, prediction and trials."""
