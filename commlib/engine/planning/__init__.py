"""Which parameters share a bucket: what is measured, predicted and tried."""
