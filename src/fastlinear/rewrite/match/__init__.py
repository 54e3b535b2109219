"""What of a model may be rewritten: linears, what follows them, and chains of them."""
