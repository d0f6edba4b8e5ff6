"""What every algorithm, codec and driver must do, as suites over all that are registered."""
