"""Communication requests and the transports that execute them."""
