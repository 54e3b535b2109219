"""The rule of experts: equal modules of one list on rows of their own, as findings."""
