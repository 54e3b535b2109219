"""Sequentials of linears side by side, a call a layer."""
