"""The rule of grouped_linear: linears that do not wait for each other, as one call."""
