"""Chains of linear layers by Strassen's scheme; README.md has the method and the numbers."""
