"""The tables of measured choices that the product ships, and what they are made of."""
