"""The rule of linear_act: linears by themselves, with the activation behind them.

It gives the candidates that every other rule chooses from, so the session calls it by itself.
"""
