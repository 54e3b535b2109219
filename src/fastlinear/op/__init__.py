"""The front end of every family: its public calls, made from an ``OpSpec``."""
