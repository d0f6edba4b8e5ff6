"""Rounds of collectives: their order, their schedule, and the drivers that run them."""
