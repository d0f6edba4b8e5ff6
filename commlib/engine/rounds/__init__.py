"""Rounds of collectives: their order, when they start, and what drives them."""
