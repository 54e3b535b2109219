"""h_{i+1} = act_i(h_i W_iᵀ + b_i): a chain of linear layers as one operation."""
